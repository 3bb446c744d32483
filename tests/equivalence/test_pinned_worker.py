"""Pinned tokens in the engine as it ships, core and worker, against dense loops."""

from __future__ import annotations

import random
import struct
from array import array
from pathlib import Path

import pytest

from engine_service.composition import Engine
from engine_service.core.messages import Submit
from engine_service.core.params import DecodingChoice, SamplingParams
from engine_service.worker.tables import RowTables
from tests.equivalence.test_pinned import Asked, reference
from tests.equivalence.test_worker_engine import BLOCK, VOCAB, Dense, as_sdar, make_engine
from tests.models.checkpoints import Case, write
from tests.sampling_batches import choosing_all


@pytest.fixture(scope="module")
def sdar(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Dense]:
    folder = tmp_path_factory.mktemp("sdar")
    case = Case(name="sdar", kind="Qwen3", options={"head_dim": 16}, edit=as_sdar)
    return folder, Dense(write(case, folder, seed=5))


def make_requests(rng: random.Random) -> list[Asked]:
    """Half of them with pinned tokens, over borders of blocks of 8."""
    requests = []
    for number in range(8):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 30))]
        places = range(len(prompt) + 1, len(prompt) + 24)
        chosen = [p for p in places if rng.random() < 0.5] if number % 2 else []
        pinned = {p: rng.randrange(VOCAB) for p in chosen}
        requests.append(Asked(prompt, 24, {"threshold": rng.choice([0.0, 0.02, 1.5])}, pinned))
    return requests


def run(engine: Engine, requests: list[Asked]) -> tuple[list[list[int]], int]:
    """Tokens of every request, and how often somebody was preempted."""
    outputs: list[list[int]] = [[] for _ in requests]
    scheduler, preemptions = engine.scheduler, 0
    for key, one in enumerate(requests):
        sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=one.count)
        scheduler.submit(
            Submit(
                key=key,
                request_id=str(key),
                prompt=struct.pack(f"<{len(one.prompt)}I", *one.prompt),
                sampling=sampling,
                decoding=DecodingChoice(params=one.knobs),
                pinned=tuple(one.pinned.items()),
            )
        )
    while scheduler.has_work:
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.apply(plan, engine.executor.collect(engine.executor.launch(plan)))
        scheduler.check_integrity()
        output = scheduler.emit()
        if output is None:
            continue
        tokens = iter(array("I", output.token_ids))
        for key, size in zip(output.keys, output.counts, strict=True):
            outputs[key] += [next(tokens) for _ in range(size)]
        preemptions += sum(finish.usage.preemptions for _, finish in output.finished)
    return outputs, preemptions


@pytest.mark.parametrize("setup", [{"page_size": 16}, {"page_size": 8, "num_pages": 13}])
def test_pinned_tokens_are_as_if_they_had_always_been_there(
    sdar: tuple[Path, Dense], setup: dict[str, int]
) -> None:
    folder, dense = sdar
    requests = make_requests(random.Random(3))
    outputs, preemptions = run(make_engine(folder, **setup), requests)
    for one, output in zip(requests, outputs, strict=True):
        assert output == reference(dense, one, BLOCK)  # type: ignore[arg-type]
    assert (preemptions > 0) == ("num_pages" in setup)


def test_control_tables_that_forget_them_are_seen(
    sdar: tuple[Path, Dense], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, dense = sdar
    requests = make_requests(random.Random(3))
    real = RowTables._write_tokens

    def forget(self: RowTables, new_rows) -> None:  # type: ignore[no-untyped-def]
        real(self, [new._replace(pinned=()) for new in new_rows])

    monkeypatch.setattr(RowTables, "_write_tokens", forget)
    # The host knows of them and counts too few positions as open, of the whole batch.
    with choosing_all():
        outputs, _ = run(make_engine(folder), requests)
    right = [reference(dense, one, BLOCK) for one in requests]  # type: ignore[arg-type]
    assert outputs[::2] == right[::2]
    assert outputs[1::2] != right[1::2]

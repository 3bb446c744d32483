"""The last layer computes behind its attention what somebody reads: of every architecture that
changes nothing that is read, nothing that is stored, and no answer of the engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import PropertyMock, patch

import numpy as np
import pytest
import torch

from engine_service.attention.base import plan_step
from engine_service.composition import Engine, compose
from engine_service.config import EngineConfig
from engine_service.core.params import PoolChoice
from engine_service.core.step import FULL, Span
from engine_service.models.decoder import Decoder
from engine_service.worker.batch import ForwardBatch
from engine_service.worker.program import States
from tests.equivalence import pooling
from tests.equivalence.engine_runs import run
from tests.equivalence.ranks_in_threads import run_ranks
from tests.equivalence.shapes import SHAPES, Shape
from tests.equivalence.test_ranks_in_threads import answers
from tests.models.checkpoints import load
from tests.models.paged import PagedRunner, PageTable, causal

CLOSE = 1e-5
BLOCK = 8
BY_BLOCK = "llada2-by-block"
"""Whose tokens are routed a block at a time: fewer of them would take other experts."""
ALL_SHAPES = SHAPES | {
    BY_BLOCK: Shape(
        config=SHAPES["llada2-moe"].config | {"expert_capacity": 4, "block_size": BLOCK}
    )
}
READS = [[], [5], [23, 7, 0, 12, 30]]
"""Of both steps below; unlike what a step reads, in no order."""


def write(folder: Path, name: str) -> dict[str, Any]:
    (folder / "config.json").write_text(json.dumps(ALL_SHAPES[name].config))
    return {"model": str(folder), "load_format": "dummy", "seed": 3}


class Steps:
    """Two steps of three rows over one cache."""

    def __init__(self, folder: Path, name: str) -> None:
        flags = write(folder, name)
        self.model = load(folder, load_format=flags["load_format"], seed=flags["seed"])
        block = self.model.traits.mask_block
        stops = (16, 8, 8) if block < FULL else (13, 9, 10)
        spans = [causal(row, 0, stop, block) for row, stop in enumerate(stops)]
        self.steps = [spans] if block >= FULL else [spans, [self._behind(one) for one in spans]]
        draw = torch.Generator().manual_seed(2)
        self.tokens = torch.randint(80, (3, 40), generator=draw)

    @staticmethod
    def _behind(span: Span) -> Span:
        stop = span.stop + 2 * BLOCK - span.row * BLOCK // 2 * (span.mask_block == 1)
        return span._replace(start=span.stop, stop=stop, kv_len=stop)

    @torch.inference_mode()
    def run(self, reads: list[int] | None) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """[T, E] hidden states of each step, and all keys and values."""
        runner = PagedRunner(self.model, "sdpa", PageTable(3, 40, 8, seed=1))
        found = []
        for spans in self.steps:
            batch = runner.table.batch(spans)
            windows = self.model.traits.windows
            step = plan_step(runner.backend, batch, windows=windows, caches=runner.caches)
            ids = torch.cat([self.tokens[one.row, one.start : one.stop] for one in spans])
            hidden = self.model.embed(ids, torch.arange(len(ids)))
            narrow = None if reads is None else torch.tensor(reads, dtype=torch.int64)
            found.append(self.model(hidden, batch.positions, step, narrow).clone())
        return found, [part for cache in runner.caches for part in (cache.k, cache.v)]


@pytest.mark.parametrize("name", ALL_SHAPES)
def test_what_is_read_and_what_is_stored_stays(tmp_path: Path, name: str) -> None:
    steps = Steps(tmp_path, name)
    wanted, kept = steps.run(None)
    for reads in READS:
        found, stored = steps.run(reads)
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one[reads], other[reads], atol=CLOSE, rtol=CLOSE)
        for one, other in zip(stored, kept, strict=True):
            assert torch.equal(one.nan_to_num(99.0), other.nan_to_num(99.0))


@pytest.mark.parametrize("name", ["qwen3", "mixtral", "llada"])
def test_control_what_is_not_read_is_not_computed(tmp_path: Path, name: str) -> None:
    """So whoever reads another token than was said reads something else."""
    steps = Steps(tmp_path, name)
    wanted, found = steps.run(None)[0][0], steps.run(READS[-1])[0][0]
    others = sorted(set(range(len(wanted))) - set(READS[-1]))
    assert ((wanted - found)[others].abs().amax(dim=1) > 100 * CLOSE).all()


def test_control_tokens_that_are_routed_by_the_block_cannot_do_without_the_others(
    tmp_path: Path,
) -> None:
    steps = Steps(tmp_path, BY_BLOCK)
    wanted = steps.run(None)[0][0]
    steps.model._layers[-1].by_token = True
    found = steps.run(READS[-1])[0][0]
    assert not torch.allclose(found[READS[-1]], wanted[READS[-1]], atol=100 * CLOSE)


def make_engine(folder: Path, name: str, **flags: Any) -> Engine:
    flags = write(folder, name) | {"max_rows": 4, "max_model_len": 64, "page_size": 8} | flags
    return compose(EngineConfig(device="cpu", **flags), lambda *stage: None)


@contextmanager
def computing_all() -> Iterator[None]:
    """What is compared with: last layers that end with all tokens, in steps that say that
    everything is read."""
    with (
        patch.object(ForwardBatch, "reads", PropertyMock(return_value=None)),
        patch.object(Decoder, "finishes_rows", PropertyMock(return_value=False)),
    ):
        yield


def rows_of(engine: Engine) -> tuple[list[int], list[int]]:
    """Rows that the first and the last layer behind attention get, step by step, from now on."""
    model = engine.executor._runner._program.model
    counts: tuple[list[int], list[int]] = ([], [])
    for layer, seen in zip((model._layers[0], model._layers[-1]), counts, strict=True):
        layer.feed_forward.register_forward_pre_hook(
            lambda _, inputs, seen=seen: seen.append(len(inputs[0]))
        )
    return counts


@pytest.mark.parametrize(
    ("name", "budget", "first", "most"),
    [
        ("qwen3", 16, [16, 16, 8] + [1] * 15, 1),
        ("qwen3-moe", 16, [16, 16, 8] + [1] * 15, 1),
        ("sdar", 16, [16, 16, 16], BLOCK),
        ("fast-dllm", 16, [16, 16, 16], BLOCK),
        ("llada", None, [56] * 8, 8),
        ("llada-guided", None, [112] * 8, 16),
        ("llada-sparse", None, [56, 56, 8, 8] * 2, 8),
    ],
)
def test_the_last_layer_gets_the_rows_that_are_read(
    tmp_path: Path, name: str, budget: int | None, first: list[int], most: int
) -> None:
    """A prompt of 40 tokens and 16 behind it, of which canvases decide at most 8 at a time; chunks
    of the prompt that decide nothing never get there."""
    engine = make_engine(tmp_path, name, token_budget=budget)
    before, last = rows_of(engine)
    run(engine, [list(range(1, 41))], 16, [SHAPES[name].knobs])
    assert before[: len(first)] == first
    assert len(last) == len(before) - (2 if budget else 0)
    assert max(last[: len(first)]) == most
    if name == "qwen3":
        assert last == [1] * 16


@pytest.mark.parametrize("budget", [None, 24])
@pytest.mark.parametrize("name", ALL_SHAPES)
def test_every_answer_stays(tmp_path: Path, name: str, budget: int | None) -> None:
    """Tokens, log-probabilities of outputs and prompts, masks and penalties; prompts whole and in
    chunks, beside rows that decide."""
    knobs = ALL_SHAPES[name].knobs
    if budget and knobs:
        budget = 64  # a canvas is never cut
    engine = make_engine(tmp_path, name, token_budget=budget)
    before, last = rows_of(engine)
    tokens, ids, values = answers(engine, knobs)
    assert sum(last) < sum(before) or name == BY_BLOCK
    with computing_all():
        whole = make_engine(tmp_path, name, token_budget=budget)
        before, last = rows_of(whole)
        wanted = answers(whole, knobs)
    assert last == before
    assert (tokens, ids) == wanted[:2]
    assert len({tuple(one) for one in tokens}) > 3
    for one, other in zip(values, wanted[2], strict=True):
        assert one == pytest.approx(other, abs=1e-4)


@pytest.mark.parametrize("name", ["qwen3", "llada-guided"])
def test_control_other_reads_give_other_answers(tmp_path: Path, name: str) -> None:
    knobs, own = SHAPES[name].knobs, ForwardBatch.reads.fget
    assert own is not None

    def beside(batch: ForwardBatch) -> torch.Tensor | None:
        reads = own(batch)
        return None if reads is None else (reads + 1) % len(batch.places)

    wanted = answers(make_engine(tmp_path, name), knobs)
    with patch.object(ForwardBatch, "reads", property(beside)):
        assert answers(make_engine(tmp_path, name), knobs)[0] != wanted[0]


@pytest.mark.parametrize("name", ["sdar", "llada", "dream"])
def test_control_attention_of_other_tokens_gives_other_answers(tmp_path: Path, name: str) -> None:
    """Where open positions end the last layer, they do so with what was attended for them."""
    knobs, own = SHAPES[name].knobs, States.at

    def beside(states: States, queries: torch.Tensor, out: States | None = None) -> States:
        assert states.mixed_TC is not None
        return own(states._replace(mixed_TC=states.mixed_TC.roll(1, 0)), queries, out)

    wanted = answers(make_engine(tmp_path, name), knobs)
    with patch.object(States, "at", beside):
        assert answers(make_engine(tmp_path, name), knobs)[0] != wanted[0]


@pytest.mark.parametrize("name", ["qwen3", "sdar-moe", "llada-sparse"])
def test_ranks_compute_the_same_few(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums of few rows, and none at all in chunks that decide nothing."""
    knobs = SHAPES[name].knobs
    flags = write(tmp_path, name) | {"max_rows": 4, "max_model_len": 64, "page_size": 8}
    flags |= {} if knobs else {"token_budget": 16}
    seen: list[list[int]] = []

    def work(engine: Engine) -> Any:
        counts = rows_of(engine)
        found = answers(engine, knobs)
        seen.append(counts[1])
        assert sum(counts[1]) < sum(counts[0])
        return found

    together = run_ranks(monkeypatch, 2, work, **flags)
    assert seen[0] == seen[1]
    assert together[0] == together[1]
    with computing_all():
        wanted = run_ranks(monkeypatch, 2, lambda engine: answers(engine, knobs), **flags)
    assert together[0][:2] == wanted[0][:2]


def test_vectors_and_answers_of_one_step(tmp_path: Path) -> None:
    """A step that pools computes everything; its neighbours compute what they read."""

    def found(engine: Engine) -> tuple[dict[int, list[int]], list[np.ndarray]]:
        for key in range(8):
            prompt = list(range(3 + key, 23 + 3 * key))
            pool = PoolChoice(kind=("mean", "last", "cls")[key % 3]) if key % 2 else None
            pooling.submit(engine, key, prompt, pool)
        outcome = pooling.run(engine)
        return outcome.tokens, [outcome.vector(key) for key in range(1, 8, 2)]

    engine = make_engine(tmp_path, "qwen3", token_budget=32)
    before, last = rows_of(engine)
    tokens, vectors = found(engine)
    both = list(zip(before, last, strict=True))
    assert any(one == other > 4 for one, other in both)
    assert any(one > other for one, other in both)
    with computing_all():
        wanted = found(make_engine(tmp_path, "qwen3", token_budget=32))
    assert tokens == wanted[0]
    for one, other in zip(vectors, wanted[1], strict=True):
        np.testing.assert_allclose(one, other, atol=CLOSE)

"""The state table, the pipe's framing and the simulated executor."""

from __future__ import annotations

import asyncio
import pickle
import random
import subprocess
import sys
import threading
import time

import pytest

from engine_service.__main__ import StateLog
from engine_service.core.messages import Load
from engine_service.core.params import MethodParams, ResolvedSampling
from engine_service.core.step import EMPTY_CANVAS, NewRow, Span, StepPlan
from engine_service.core.strategy import ExecutorLimits
from engine_service.pipe import BlockingPipe, PeerGone, Unframer, frame, pair
from engine_service.server.convert_out import pack
from engine_service.server.state import EngineState, IllegalMove, StateBoard
from engine_service.simulated import SimulatedExecutor, first_token_seed
from tests.waiting import PATIENCE_S

S = EngineState
IDLE, BUSY = Load(0, 0, 0, 0, 8), Load(1, 0, 0, 1, 8)


def board(*states: EngineState) -> StateBoard:
    made = StateBoard()
    for state in states:
        made.move(state, state.name)
    return made


WAYS = {
    S.UNINITIALIZED: (),
    S.LOADING: (S.LOADING,),
    S.READY: (S.LOADING, S.READY),
    S.BUSY: (S.LOADING, S.READY, S.BUSY),
    S.DRAINING: (S.LOADING, S.READY, S.DRAINING),
    S.SHUTDOWN: (S.LOADING, S.READY, S.DRAINING, S.SHUTDOWN),
    S.ERROR: (S.LOADING, S.ERROR),
}
LEGAL = {
    (S.UNINITIALIZED, S.LOADING),
    (S.LOADING, S.READY),
    (S.LOADING, S.ERROR),
    (S.READY, S.BUSY),
    (S.BUSY, S.READY),
    (S.READY, S.DRAINING),
    (S.BUSY, S.DRAINING),
    (S.DRAINING, S.SHUTDOWN),
    (S.READY, S.ERROR),
    (S.BUSY, S.ERROR),
    (S.DRAINING, S.ERROR),
}


def test_every_move_is_legal_or_rejected() -> None:
    """All pairs of different states; those that are legal are written down here once more."""
    assert set(WAYS) == set(EngineState)
    for before, way in WAYS.items():
        for after in set(EngineState) - {before}:
            made = board(*way)
            seen = made.snapshot
            if (before, after) in LEGAL:
                made.move(after, "")
                assert made.state is after
            else:
                with pytest.raises(IllegalMove):
                    made.move(after, "")
                assert made.snapshot == seen


def test_busy_is_derived_only_while_serving() -> None:
    made = board(S.LOADING)
    made.observe(BUSY, "x")
    assert (made.state, made.snapshot.detail) == (S.LOADING, "LOADING")
    made.move(S.READY, "")
    made.observe(BUSY, "x")
    assert made.state is S.BUSY
    revision = made.snapshot.revision
    made.observe(BUSY, "x")
    assert made.snapshot.revision == revision
    made.observe(IDLE, "x")
    assert made.state is S.READY


async def test_a_watcher_sees_the_snapshot_and_the_last_state() -> None:
    made = board(S.LOADING)
    seen = []

    async def watch() -> None:
        async for snapshot in made.watch():
            seen.append(snapshot.state)

    watcher = asyncio.create_task(watch())
    for state in (S.READY, S.DRAINING, S.SHUTDOWN):
        await asyncio.sleep(0)
        made.move(state, "")
    await asyncio.wait_for(watcher, PATIENCE_S)
    assert seen[0] is S.LOADING
    assert seen[-1] is S.SHUTDOWN


def test_the_log_has_one_line_per_stage_and_state(caplog: pytest.LogCaptureFixture) -> None:
    """But for the last one: who ends because of it says so."""
    log, made = StateLog(), StateBoard()
    with caplog.at_level("INFO", "tidemill.engine"):
        made.move(S.LOADING, "starting the core process")
        log(made.snapshot)
        for done in range(1, 69):
            made.move(S.LOADING, f"weights {done}/68")
            log(made.snapshot)
        made.move(S.READY, "no request has ended yet")
        for load in (IDLE, BUSY, IDLE):
            log(made.snapshot)
            made.observe(load, f"finished: length={load.running}")
        made.move(S.ERROR, "the core died")
        log(made.snapshot)
    assert caplog.messages == [
        "loading: starting the core process",
        "loading: weights 1/68",
        "ready: no request has ended yet",
    ]


@pytest.mark.parametrize("seed", range(20))
def test_frames_survive_any_cut(seed: int) -> None:
    rng = random.Random(seed)
    batches = [[rng.randbytes(rng.randrange(50)), i] for i in range(20)]
    stream = b"".join(frame(batch) for batch in batches)
    unframer, got = Unframer(), []
    while stream:
        cut = rng.randint(1, 40)
        got += unframer.feed(stream[:cut])
        stream = stream[cut:]
    assert got == [one for batch in batches for one in batch], f"seed {seed}"


def test_pipe_waits_delivers_and_notices_death() -> None:
    ours, theirs = pair()
    left, right = BlockingPipe(ours), BlockingPipe(theirs)
    assert left.receive(0.0) == []
    big = [b"x" * (12 << 20)]
    sender = threading.Thread(target=right.send, args=(big,))
    sender.start()
    assert left.receive(None) == big
    sender.join()
    theirs.close()
    with pytest.raises(PeerGone):
        left.receive(None)
    with pytest.raises(PeerGone):
        left.send([1])
    ours.close()


def test_the_pipe_speaks_pickle_5() -> None:
    assert frame([1])[4:] == pickle.dumps([1], protocol=5)


def new_row(row: int, prompt: list[int], choice: int = 0, more: tuple[int, ...] = ()) -> NewRow:
    sampling = ResolvedSampling(
        temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0,
        presence_penalty=0.0, frequency_penalty=0.0, logit_bias={}, seed=1, choice=choice,
        max_tokens=9, min_tokens=0, stop_token_ids=frozenset(), stop_token_sequences=(),
        suppress=(), logprobs=1, prompt_logprobs=None,
    )  # fmt: skip
    tokens = [*prompt, *more]
    return NewRow(
        row, tokens, len(prompt), EMPTY_CANVAS, "autoregressive", MethodParams(), sampling
    )


def test_simulated_tokens_depend_on_request_and_position_only() -> None:
    limits = ExecutorLimits(8, 16, 4, 64)
    executor = SimulatedExecutor(limits, vocab_size=50, step_s=0.02, never=frozenset({2, 3}))
    spans = (Span(0, 0, 4, 4, 1, 4, 5), Span(1, 0, 2, 2, 1, 0, 0), Span(2, 3, 4, 4, 1, 4, 5))
    rows = (new_row(0, [1, 2, 3, 4]), new_row(1, [9, 9, 9]), new_row(2, [1, 2, 3], more=(7,)))
    began = time.monotonic()
    plan = StepPlan(seq=1, new_rows=rows, page_appends=(), own_spans=spans)
    first, second, third = executor.collect(executor.launch(plan)).own
    assert time.monotonic() - began >= 0.02
    assert second is None
    assert first is not None
    seed = first_token_seed(pack([1, 2, 3, 4]), 0)
    assert first.token_ids == [executor.token(seed, 4)]
    assert first.final == [True]
    assert first.logprobs is not None
    assert first.logprobs[0] is not None
    assert first.logprobs[0].token_ids[0] == first.token_ids[0]
    assert third is not None
    assert third.token_ids == [executor.token(first_token_seed(pack([1, 2, 3]), 0), 4)]
    produced = {executor.token(seed, position) for position in range(500)}
    assert produced == set(range(50)) - {2, 3}
    assert first_token_seed(pack([1]), 0) != first_token_seed(pack([1]), 1)


@pytest.mark.parametrize(
    "module", ["engine_service.server.launch", "engine_service.simulated", "engine_service.rank"]
)
def test_no_torch_is_imported(module: str) -> None:
    code = f"import {module}, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

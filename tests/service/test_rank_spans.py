"""Spans of several ranks: one trace a step, with every rank's part below it."""

from __future__ import annotations

from typing import Any

import pytest

from engine_service.core.messages import RankTrace, StepTrace
from engine_service.server.launch import EngineServer
from engine_service.server.observer import Observer
from engine_service.server.state import EngineState
from tests.otlp import Collector, collecting, values_of
from tests.service.engine_fixtures import config, session, stubs
from tests.service.test_engine_ranks import START_S
from tests.waiting import until

UNSAMPLED, TOKENS = f"00-{1:032x}-00f067aa0ba902b7-00", 6


def listening(observer: Observer) -> list[StepTrace | RankTrace]:
    """What the observer hears from now on."""
    heard: list[StepTrace | RankTrace] = []
    real = observer.stepped

    def stepped(told: StepTrace | RankTrace) -> None:
        heard.append(told)
        real(told)

    observer.stepped = stepped  # type: ignore[method-assign]
    return heard


@pytest.mark.timeout(300)
async def test_every_rank_has_its_part_below_the_step() -> None:
    """Of two real ranks at level 3; below it, which is the control, the others are not asked."""
    chosen: dict[str, Any] = {"model": "demo", "device": "cpu", "max_rows": 4}
    with collecting() as (collector, endpoint):
        server = await EngineServer.start(
            config(tensor_parallel_size=2, otlp_endpoint=endpoint, trace_level=2, **chosen)
        )
        try:
            await until(lambda: server.desk.board.state >= EngineState.READY, START_S)
            heard = listening(server.desk.observer)
            async with stubs(server) as stub, session(stub) as client:
                for level in (2, 3):
                    server.desk.observer.set_trace_level(level)
                    header = f"00-{level:032x}-00f067aa0ba902b7-01"
                    await client.submit(level, 84, 104, max_tokens=TOKENS, traceparent=header)
                    await client.drain(level)
                    await client.submit(10 + level, 84, max_tokens=3, traceparent=UNSAMPLED)
                    await client.drain(10 + level)
                await until(lambda: len(heard) == 3 * TOKENS)
        finally:
            await server.stop()
    for level, ranks in ((2, [0]), (3, [0, 1])):
        (request,) = (
            s for s in collector.of_trace(f"{level:032x}") if s.name.endswith("/Generate")
        )
        check(collector, request.span_id, ranks)


def check(collector: Collector, request_id: bytes, ranks: list[int]) -> None:
    """Steps are linked with the request they worked for; their parts are in the trace of theirs."""
    steps = [span for span in collector.spans if span.name == "engine.step"]
    mine = [step for step in steps if {link.span_id for link in step.links} == {request_id}]
    assert len(mine) == TOKENS
    for step in mine:
        parts = [span for span in collector.spans if span.parent_span_id == step.span_id]
        assert {part.name for part in parts} == {"tp.forward"}
        assert {part.trace_id for part in parts} == {step.trace_id}
        assert sorted(values_of(part)["tidemill.rank"] for part in parts) == ranks
        times = [(part.start_time_unix_nano, part.end_time_unix_nano) for part in parts]
        assert step.start_time_unix_nano <= min(start for start, _ in times)
        # They add up together in every layer: neither is done before the other has begun.
        assert max(start for start, _ in times) < min(stop for _, stop in times)

"""A call that ends with its deadline counts as DEADLINE, one whose client leaves as ABORTED."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from typing import Any

import pytest

from engine_service.config import EngineConfig
from engine_service.core.messages import FinishReason
from engine_service.server.generation import Generation
from tests.service.engine_fixtures import spec
from tidemill.v1 import engine_pb2 as pb


class Stream:
    """A call with so many seconds left."""

    def __init__(self, left_s: float | None) -> None:
        self._left_s = left_s

    def time_remaining(self) -> float | None:
        return self._left_s


class Desk:
    """Takes every sequence, and keeps why it was given up."""

    def __init__(self) -> None:
        self.core = self
        self.config = EngineConfig()
        self.submitted = asyncio.Event()
        self.released: list[tuple[int, FinishReason]] = []

    def check_open(self) -> None:
        """Always."""

    def admitting(self, method: str, trace: Any) -> Any:
        return nullcontext()

    def submit(self, submit: Any, sink: Any, handle: int, trace: Any) -> int:
        self.submitted.set()
        return 10 + handle

    def release(self, key: int, reason: FinishReason) -> None:
        self.released.append((key, reason))


@pytest.mark.parametrize(
    ("left_s", "reason"),
    [
        (0.001, FinishReason.DEADLINE),  # a client's clock may be this much ahead of ours
        (3600.0, FinishReason.ABORTED),
        (None, FinishReason.ABORTED),
    ],
)
async def test_why_a_cancelled_call_is_given_up(left_s: float | None, reason: FinishReason) -> None:
    desk: Any = Desk()
    request = pb.GenerateRequest(spec=spec(1), n=2)
    running = asyncio.create_task(Generation(desk, Stream(left_s)).run(request))
    await asyncio.wait_for(desk.submitted.wait(), 10)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert desk.released == [(10, reason), (11, reason)]

"""What a frontend counts as outstanding: reports of load and requests cross on the wire."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontend.engine_slots import Slots
from frontend.message_limit import MessageLimit
from frontend.messages import Sequence
from frontend.request import Decoding, Sampling
from frontend.rounds import Rounds
from tidemill.runtime.errors import InvalidRequest
from tidemill.v1 import engine_pb2 as pb

PROMPT_TOKENS = 3
EVENTS = ("submit", "read", "end", "report", "hear")


class Wire:
    """A frontend's slots, an engine that counts, and what is on its way between them."""

    def __init__(self, knows: bool) -> None:
        self.slots = Slots(Rounds(), MessageLimit(1 << 20))
        self.asked: deque[int] = deque()
        self.told: deque[pb.SessionResponse] = deque()
        self.live: list[int] = []
        self.num_sent = self.num_read = self.running = 0
        self.knows = knows

    def turn(self, event: str) -> None:
        if event == "submit":
            self.num_sent += 1
            self.asked.append(self.num_sent)
            prompt = bytes(4 * PROMPT_TOKENS)
            sequence = Sequence(
                index=0, choice=0, prompt=prompt, sampling=Sampling(), decoding=Decoding()
            )
            self.slots.open("one", [sequence], timeout_ms=None, trace=None)
        elif event == "read" and self.asked:
            self.num_read += 1
            self.live.append(self.asked.popleft())
        elif event == "end" and self.live:
            self.told.append(pb.SessionResponse(failed=pb.Failed(handle=self.live.pop(0))))
        elif event == "report":
            load = pb.Load(running=len(self.live))
            report = pb.LoadReport(load=load, submits=self.num_read)
            self.told.append(pb.SessionResponse(load_report=report))
        elif event == "hear" and self.told:
            self.hear(self.told.popleft())

    def hear(self, frame: pb.SessionResponse) -> None:
        if frame.WhichOneof("frame") == "failed":
            self.slots.on_failed(frame.failed)
        else:
            self.running = frame.load_report.load.running
            self.slots.reported(frame.load_report.submits if self.knows else sys.maxsize)


async def walked(events: Iterable[str], *, knows: bool) -> list[tuple[int, int, int]]:
    """(outstanding as counted, outstanding, prompt tokens atop of the report), event by event."""
    wire, counts = Wire(knows), []
    for event in events:
        wire.turn(event)
        counted = wire.running + wire.slots.sent
        counts.append((counted, len(wire.slots), wire.slots.sent_tokens))
    return counts


@given(st.lists(st.sampled_from(EVENTS), max_size=60))
def test_nothing_outstanding_is_forgotten_or_counted_twice(events: list[str]) -> None:
    for counted, outstanding, tokens in asyncio.run(walked(events, knows=True)):
        assert counted == outstanding
        assert tokens % PROMPT_TOKENS == 0


def test_a_report_that_crosses_requests() -> None:
    """It made the next ones of a burst go to the same engine."""
    burst = ("report", "submit", "submit", "hear")
    assert asyncio.run(walked(burst, knows=True))[-1] == (2, 2, 2 * PROMPT_TOKENS)
    assert asyncio.run(walked(burst, knows=False))[-1] == (0, 2, 0), "control: taken for known"


async def test_who_has_nothing_to_say_pings() -> None:
    """Only what was sent can stay unacknowledged; and no request is lost to a ping's timer."""
    slots = Slots(Rounds(), MessageLimit(1 << 20))
    assert (await slots.outgoing()).WhichOneof("frame") == "ping"
    asked = [pb.SessionRequest(submit=pb.Submit(handle=handle)) for handle in range(1, 40)]

    async def ask() -> None:
        for frame in asked:
            await asyncio.sleep(0.02)
            slots.outbox.put(frame)

    asking = asyncio.create_task(ask())
    frames: list[pb.SessionRequest] = []
    while len(frames) < len(asked):
        frame = await slots.outgoing()
        frames += [frame] if frame.HasField("submit") else []
    await asking
    assert frames == asked
    assert (await slots.outgoing()).WhichOneof("frame") == "ping"


async def test_what_sequences_list_does_not_multiply_without_bound() -> None:
    """A list of 4 MB was converted and kept for each of 1,024 prompts."""
    slots = Slots(Rounds(), MessageLimit(64 << 20))
    listed = Sampling(allowed_token_ids=(100_000,) * 300_000)
    sequences = [
        Sequence(index=i, choice=0, prompt=bytes(4), sampling=replace(listed), decoding=Decoding())
        for i in range(256)
    ]
    began = time.process_time()
    with pytest.raises(InvalidRequest, match="256 sequences of this request are more than"):
        slots.open("one", sequences, timeout_ms=None, trace=None)
    assert time.process_time() - began < 1.5
    assert len(slots) == 0
    slots.open("one", sequences[:16], timeout_ms=None, trace=None)
    frames = [await slots.outgoing() for _ in range(16)]
    assert {len(one.submit.spec.sampling.allowed_token_ids) for one in frames} == {300_000}

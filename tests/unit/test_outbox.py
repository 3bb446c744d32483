"""The outbox towards the engine: in order, and without room when the engine stops reading."""

from __future__ import annotations

import pytest

from frontend.outbox import MAX_UNSENT_BYTES, Outbox
from tidemill.runtime.errors import Overloaded


class Frame:
    def __init__(self, size: int) -> None:
        self.size = size

    def ByteSize(self) -> int:
        return self.size


async def test_room_is_counted_and_comes_back() -> None:
    outbox: Outbox[Frame] = Outbox()
    frames = [Frame(MAX_UNSENT_BYTES // 2) for _ in range(2)]
    for frame in frames:
        outbox.check_room()
        outbox.put(frame)
    with pytest.raises(Overloaded, match=rf"2 messages .* limit is {MAX_UNSENT_BYTES}") as caught:
        outbox.check_room()
    assert (caught.value.reason, caught.value.retry_after_ms) == ("ENGINE_NOT_READING", 1000)
    outbox.put(abort := Frame(0))  # an abort always gets in
    assert [await outbox.get() for _ in range(3)] == [*frames, abort]
    outbox.check_room()


async def test_small_messages_count_too() -> None:
    outbox: Outbox[Frame] = Outbox()
    for _ in range(MAX_UNSENT_BYTES // 4096 + 1):
        outbox.put(Frame(1))
    with pytest.raises(Overloaded):
        outbox.check_room()

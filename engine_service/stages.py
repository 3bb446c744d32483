"""Stages of a pipeline: who holds which layers, and what neighbouring stages send each other.

Hidden states go to the stage behind, what the last stage has decided goes to all others. Sends and
receives have no names: all ranks run the same steps in the same order, and so they meet. It does
not know models or what is decided.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

_LEAVING_S = 2.0
"""For what is on its way to arrive, when a rank leaves; somebody may be gone already."""
_LOOK_S = 1e-3


def _receive(into: torch.Tensor, rank: int, group: Any) -> Any:
    work = dist.irecv(into, rank, group=group)
    assert work is not None, "a rank outside of its own group"
    return work


def _most_unsent(num_stages: int) -> int:
    """More than there are steps in flight. One that is cut in two may wait for an older one."""
    return 2 * num_stages


class Heard:
    """Bytes on their way from the last stage to this one and, from a device, to the host."""

    def __init__(
        self, size: int, source: int, group: Any, side: torch.cuda.Stream | None = None
    ) -> None:
        """On a device beside the steps, on the stream `side`: what is launched next must not wait
        for what the last stage does."""
        self._side = side
        if side is None:
            self._host = torch.empty(size, dtype=torch.uint8)
            self._work = _receive(self._host, source, group)
            return
        with torch.cuda.stream(side):
            words = torch.empty(size, dtype=torch.uint8, device=side.device)
            self._work = _receive(words, source, group)
            self._work.wait()
            self._host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
            self._host.copy_(words, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(side)

    def wait(self) -> torch.Tensor:
        """[size] uint8 on the host."""
        if self._side is None:
            self._work.wait()
        else:
            self._event.synchronize()
        return self._host


class Links:
    """From one rank to those of the other stages that hold the same share of their layers."""

    def __init__(self, rank: int, num_ranks: int, *, num_stages: int, device: torch.device) -> None:
        """Every rank must call it."""
        self._device, size = device, num_ranks // num_stages
        self._rank, self._ahead, self._behind = rank, rank - size, rank + size
        mine = range(rank % size, num_ranks, size)
        self._last, self._others = mine[-1], mine[:-1]
        # A channel of its own: on a device a receive holds up what follows it in its channel.
        self.back = dist.new_group()
        # One stream for all: torch has 32 in turn, and a new one may be that of another channel.
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._unsent: deque[tuple[Any, torch.Tensor]] = deque()
        self._most_unsent = _most_unsent(num_stages)

    def greet(self) -> None:
        """One message on every channel, along the stages and back; all ranks call it. A device's
        channels are made with their first message and take memory, which is measured behind this.
        """
        word = torch.zeros(1, dtype=torch.uint8, device=self._device)
        if self._ahead >= 0:
            self.receive(torch.empty_like(word))
        if self._rank == self._last:
            self.tell(word)
        else:
            self.pass_on(word)
            self.hear(1).wait()

    def receive(self, into: torch.Tensor) -> None:
        """What the stage ahead passes on in this step."""
        _receive(into, self._ahead, None).wait()

    def pass_on(self, hidden: torch.Tensor) -> None:
        """To the stage behind, without waiting for it; nobody may write to `hidden` any more."""
        self._send(hidden, self._behind, None)

    def tell(self, words: torch.Tensor) -> None:
        """[size] uint8 of the last stage to all others, without waiting for them."""
        for rank in self._others:
            self._send(words, rank, self.back)

    def hear(self, size: int) -> Heard:
        """What the last stage tells in this step; does not wait for it."""
        return Heard(size, self._last, self.back, self._side)

    def flush(self) -> bool:
        """Returns when all is where it should be, so that this rank may leave; False: a device
        waits for somebody who is not there any more."""
        with contextlib.suppress(RuntimeError):
            while self._unsent:
                self._unsent.popleft()[0].wait()
        if self._side is None:
            return True
        # On a device waiting only puts what is launched next behind the messages.
        stream = torch.cuda.current_stream(self._device)
        stream.wait_stream(self._side)
        done, deadline = torch.cuda.Event(), time.monotonic() + _LEAVING_S
        done.record(stream)  # not of the device that is this thread's
        while not (is_done := done.query()) and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        return is_done

    def _send(self, tensor: torch.Tensor, rank: int, group: Any) -> None:
        self._unsent.append((dist.isend(tensor, rank, group=group), tensor))
        while len(self._unsent) > self._most_unsent:
            self._unsent.popleft()[0].wait()


@dataclass(frozen=True, slots=True, eq=False)
class Stage:
    """Number `index` of `count` parts that the layers are split into."""

    index: int = 0
    count: int = 1
    links: Links | None = field(default=None, repr=False)
    """None: there are no others, or nobody of them runs what this one does (a rehearsal)."""

    @property
    def is_first(self) -> bool:
        """It embeds."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """It has the output head, and decides."""
        return self.index == self.count - 1

    def layers(self, num_layers: int) -> range:
        """Its layers; the first stages have one more where they cannot be equal, because the last
        one has the output head."""
        first, stop = (
            -(-index * num_layers // self.count) for index in (self.index, self.index + 1)
        )
        return range(first, stop)

    @property
    def num_waiting(self) -> int:
        """Hidden states of steps in flight that lie here at most, beside those of the step that is
        computed: what the stage ahead has passed on already, what the one behind has yet to take.
        """
        taken = 0 if self.is_first else self.count
        return taken + (0 if self.is_last else _most_unsent(self.count))

    @property
    def unlinked(self) -> Stage:
        """The same by itself: hidden states come from nowhere and go nowhere."""
        return replace(self, links=None)


WHOLE = Stage()
"""All layers."""

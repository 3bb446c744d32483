"""Several ranks as threads of one process, each a whole engine on the same requests.

What they would say to each other through gloo or NCCL they say through lists. For tests of many
cases.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from engine_service.composition import Engine, compose
from engine_service.config import EngineConfig
from engine_service.distributed import Group
from engine_service.place import Place
from engine_service.worker import worker

TIMEOUT_S = 60.0


class Meeting:
    """What `size` ranks have said; each says the same kind of thing at the same time."""

    def __init__(self, size: int) -> None:
        self._said: list[Any] = [None] * size
        self._barrier = threading.Barrier(size, timeout=TIMEOUT_S)
        self._failing = threading.Barrier(size)

    def all_of(self, rank: int, fact: Any) -> list[Any]:
        self._said[rank] = fact
        self._barrier.wait()
        said = list(self._said)
        self._barrier.wait()
        return said

    def await_all(self, within_s: float) -> None:
        try:
            self._failing.wait(within_s)
        except threading.BrokenBarrierError:
            raise RuntimeError("not all ranks are here") from None

    def give_up(self) -> None:
        self._barrier.abort()


def group_of(rank: int, size: int, meeting: Meeting) -> Group:
    """Its sums are made in the order of ranks."""

    class ThreadGroup(Group):
        def sum_(self, x: torch.Tensor) -> torch.Tensor:
            parts = meeting.all_of(rank, x.clone())
            return x.copy_(sum(parts[1:], start=parts[0]))

        def join(self, x_NV: torch.Tensor) -> torch.Tensor:
            return torch.cat(meeting.all_of(rank, x_NV), dim=1)

        def all_of(self, fact: Any) -> list[Any]:
            return meeting.all_of(rank, fact)

        def await_all(self, within_s: float) -> None:
            meeting.await_all(within_s)

    return ThreadGroup(rank, size)


def run_ranks(
    monkeypatch: pytest.MonkeyPatch, size: int, work: Callable[[Engine], Any], **flags: Any
) -> list[Any]:
    """What `work` makes of the engine of each rank."""
    meeting, found, failures = Meeting(size), [None] * size, list[BaseException]()
    monkeypatch.setattr(
        worker, "meet", lambda place, *_, **__: group_of(place.rank, place.size, meeting)
    )

    def run(rank: int) -> None:
        try:
            config = EngineConfig(device="cpu", tensor_parallel_size=size, **flags)
            found[rank] = work(compose(config, lambda *stage: None, Place(rank, size)))
        except BaseException as failure:
            failures.append(failure)
            meeting.give_up()

    threads = [threading.Thread(target=run, args=(rank,), name=str(rank)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * TIMEOUT_S)
    if failures:
        raise failures[0]
    return found

"""What a follower does between two steps, by what rank 0 has told it."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine_service.config import EngineConfig
from engine_service.distributed import Group
from engine_service.ranks.broadcast import Ended
from engine_service.ranks.following import _run
from engine_service.ranks.group import RankGroup
from engine_service.ranks.hosts import ThisHost
from engine_service.ranks.messages import PagesGiven
from engine_service.worker.page_shares import bytes_of
from engine_service.worker.rank_pages import RankPages
from tests.unit.test_rank_group import Own, plan

CONFIG = EngineConfig(model="demo", device="cpu", tensor_parallel_size=2)


class Pages(RankPages):
    """Two pages of a layer and a head, whose moves are noted."""

    def __init__(self, done: list[str]) -> None:
        part, traits = torch.zeros(1, 2, 4, 1, 8), SimpleNamespace(num_layers=1, num_kv_heads=1)
        super().__init__(part, part, traits, Group(), torch.device("cpu"))  # type: ignore[arg-type]
        self._done = done

    def read(self, pages: Any) -> torch.Tensor:
        self._done.append("read")
        return super().read(pages)

    def write(self, pages: Any, host: torch.Tensor) -> None:
        self._done.append("write")
        super().write(pages, host)


class Noted(Own):
    """A worker on a device: what it launches is not done before it is collected."""

    depth = 2

    def __init__(self) -> None:
        self.done: list[str] = []
        self.pages = Pages(self.done)

    def facts(self) -> dict[str, Any]:
        return {}

    def launch(self, plan: Any) -> Any:
        self.done.append(f"launch {plan.seq}")
        return plan

    def collect(self, handle: Any) -> None:
        self.done.append(f"collect {handle.seq}")


def test_pages_are_moved_behind_the_steps_that_rank_0_has_collected() -> None:
    """And beside the others. Rank 0 launches nothing meanwhile: a prompt is there, and its pages
    are sent at once. The follower hears of all of it when its device is late."""
    told: list[bytes] = []
    watcher: Any = SimpleNamespace(
        plans=SimpleNamespace(send=told.append),
        followers=[],
        check=lambda: None,
        await_all=lambda condition: [],
        take_times=list,
    )
    leader, follower = Noted(), Noted()
    group = RankGroup(leader, watcher, ThisHost(CONFIG, 2))
    group.close.detach()
    first, second = group.launch(plan(1)), group.launch(plan(2))
    group.collect(first)
    whole = group.pages.read([1])
    group.collect(second)
    group.pages.write([0], whole)
    gone = weakref.ref(group)
    del group
    assert gone() is None, "what drops a group ends it at once"
    given = [PagesGiven(bytearray(bytes_of(whole)))]
    pipe: Any = SimpleNamespace(send=lambda batch: None, receive=lambda timeout_s: given)

    def receive(timeout_s: float | None = None) -> bytes:
        if not told:
            raise Ended("no more")
        return told.pop(0)

    plans: Any = SimpleNamespace(receive=receive)
    with pytest.raises(Ended):
        _run(follower, plans, pipe)  # type: ignore[arg-type]
    assert leader.done == ["launch 1", "launch 2", "collect 1", "read", "collect 2", "write"]
    assert follower.done == leader.done

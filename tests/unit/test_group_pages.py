"""Pages of several ranks as rank 0 moves them: what goes wrong in the middle ends the group."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine_service.distributed import Group
from engine_service.ranks.group_pages import Flights, GroupPages
from engine_service.ranks.watcher import Watcher
from engine_service.worker.rank_pages import RankPages
from tests.service.test_ranks_watched import AWAKE_S, group, ready
from tests.waiting import eventually, stopwatch
from tidemill.runtime.errors import EngineDead

PAGES, PAGE, HEAD = 6, 4, 8
SHARE_BYTES = 2 * PAGE * HEAD * 4
"""Of one page, one layer and one head: keys and values."""


def own(num_heads: int, num_ranks: int = 2) -> RankPages:
    """Of the first rank of several, of a model of one layer."""
    part = torch.randn(1, PAGES, PAGE, max(1, num_heads // num_ranks), HEAD)
    traits: Any = SimpleNamespace(num_layers=1, num_kv_heads=num_heads)
    return RankPages(part, part + 1, traits, Group(0, num_ranks), torch.device("cpu"))


def test_shares_are_joined_and_copies_are_not_asked_for() -> None:
    mine = own(2)
    with group(f"tells pages {2 * SHARE_BYTES}") as (watcher, _):
        ready(watcher)
        pages = GroupPages(mine, watcher, 1, Flights())
        for numbers in ([4, 1], [0, 5]):
            whole = pages.read(numbers)
            assert torch.equal(whole[:, :, :, :, :1], mine.read(numbers))
            assert not whole[:, :, :, :, 1:].any()
    with group("mirrors pages", "mirrors pages", "mirrors pages") as (watcher, _):
        ready(watcher)
        pages = GroupPages(own(4, 4), watcher, 1, Flights())
        given = torch.randn(2, *pages.format.shape)
        for _ in range(2):
            pages.write([4, 1], given)
            assert [one.took_pages for one in watcher.followers] == [True] * 3
        assert torch.equal(pages.read([4, 1]), given)
    alone = own(1)
    with group("") as (watcher, _):
        ready(watcher)
        assert torch.equal(GroupPages(alone, watcher, 1, Flights()).read([3]), alone.read([3]))


def fails(pages: GroupPages, watcher: Watcher, act: Callable[[], None], why: str) -> None:
    with stopwatch() as awake_s, pytest.raises(EngineDead, match=why):
        act()
    assert awake_s() < AWAKE_S
    with pytest.raises(EngineDead):
        pages.write([1], pages.format.empty(1))
    with pytest.raises(EngineDead):
        watcher.check()


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("moment", ["reads", "writes", "takes", "keeps"])
def test_nobody_waits_for_a_rank_that_is_lost(sent: signal.Signals, moment: str) -> None:
    """It has been asked and will never answer, or takes no more of what it is given, or has it all
    and never says so: a plan that is told to others before might get ahead of pages on their way.
    """
    with group("keeps pages" if moment == "keeps" else "mirrors pages") as (watcher, lost):
        (pid,) = ready(watcher)
        pages = GroupPages(own(2), watcher, 1, Flights())
        (follower,) = watcher.followers
        give_pages = follower.give_pages
        large = pages.format.empty(100_000)  # more than lies in a pipe

        def lose(*_: object) -> None:
            os.kill(pid, sent)

        def give(content: bytearray) -> None:
            give_pages(content)
            eventually(lambda: follower._stage == "keeps", "it never got them")
            lose()

        if moment == "takes":
            pages._own.write = lambda *_: eventually(  # type: ignore[method-assign]
                lambda: follower.awaits_pages and not lose(), "it never took them"
            )
        elif moment == "keeps":
            follower.give_pages = give  # type: ignore[method-assign]
            pages._own.write = lambda *_: None  # type: ignore[method-assign]
        else:
            watcher.plans.send = lose  # type: ignore[method-assign]
            pages._own.write = lambda *_: None  # type: ignore[method-assign]
        act = partial(pages.read, [1]) if moment == "reads" else partial(pages.write, [1], large)
        fails(pages, watcher, act, rf"rank 1 \(pid {pid}\) ")
        eventually(lambda: lost, "nobody was told")  # behind the one that waits
        assert len(lost) == 1


def test_a_share_that_does_not_fit_ends_the_group() -> None:
    with group("tells pages 4") as (watcher, _):
        ready(watcher)
        pages = GroupPages(own(2), watcher, 1, Flights())
        fails(pages, watcher, lambda: pages.read([1]), "could not move pages: RuntimeError: shape")


def test_a_page_that_rank_0_cannot_read_ends_nothing() -> None:
    """Nobody else was asked, so that what is read next is what was asked for next."""
    mine = own(2)
    with group(f"tells pages {SHARE_BYTES}") as (watcher, lost):
        ready(watcher)
        pages = GroupPages(mine, watcher, 1, Flights())
        with pytest.raises(IndexError):
            pages.read([PAGES, 1])
        assert torch.equal(pages.read([3])[:, :, :, :, :1], mine.read([3]))
        assert not lost


def test_a_page_that_rank_0_cannot_write_ends_the_group() -> None:
    """The others have it by then."""
    with group("") as (watcher, _):
        ready(watcher)
        pages = GroupPages(own(2), watcher, 1, Flights())
        whole = pages.format.empty(1)
        fails(pages, watcher, lambda: pages.write([PAGES], whole), "could not move pages: IndexErr")

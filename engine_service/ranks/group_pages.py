"""The pages of a model that several ranks share, as rank 0 reads and writes them: whole.

What the others are asked for travels with the plans, so that it has its place among the steps: a
page is read behind the steps that were told before it, and there before those told behind it. It
does not know whose pages they are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from engine_service.pipe import pack
from engine_service.ranks.messages import ReadPages, WritePages
from engine_service.ranks.watcher import Watcher
from engine_service.worker.page_shares import bytes_of, cut, join, shares_of
from engine_service.worker.rank_pages import RankPages
from tidemill.runtime.errors import EngineDead


class Flights:
    """Steps of rank 0, which are collected in the order in which they were launched."""

    def __init__(self) -> None:
        self._launched: deque[int] = deque()
        self.settled = 0
        """The number of the last one that was collected."""

    def launch(self, seq: int) -> None:
        self._launched.append(seq)

    def collect(self) -> None:
        """The oldest."""
        self.settled = self._launched.popleft()


class GroupPages:
    """Implements worker.page_store.WholePages. Raises EngineDead, and the group ends, where not all
    ranks do what they are told."""

    def __init__(self, own: RankPages, watcher: Watcher, num_stages: int, flights: Flights) -> None:
        """`own` and `flights`: rank 0's."""
        self.format, self.device = own.format, own.device
        self._own = own
        self._watcher = watcher
        self._flights = flights
        num_layers, *_, num_heads, _ = own.format.shape
        shares = shares_of(len(watcher.followers) + 1, num_stages, num_layers, num_heads)
        self._shares = shares
        self._others = [rank for rank, share in enumerate(shares) if rank and not share.is_copy]

    def read(self, pages: Sequence[int], into: torch.Tensor | None = None) -> torch.Tensor:
        """[N, L, 2, G, K, D]: what each rank has of it, copies left out, in `into` if it is given.
        Raises what rank 0's own read raises, too, which hurts nobody: the others have not been
        asked yet."""
        watcher, shares, others = self._watcher, self._shares, self._others
        own = self._own.read(pages)
        with self._together():
            watcher.plans.send(pack(ReadPages(tuple(pages), self._flights.settled)))
            told = watcher.await_all(lambda one: one.rank not in others or one.pages_read)
            whole = self.format.empty(len(pages)) if into is None else into
            cut(whole, shares[0]).copy_(own)
            parts = [told[rank - 1].take_pages() for rank in others]
            join(whole, [shares[rank] for rank in others], parts)
        return whole

    def write(self, pages: Sequence[int], whole: torch.Tensor) -> None:
        """Each rank gets what is its own, and has it when this returns. What is large waits for who
        takes it: signs of life of several hosts come by the same way. So do plans, which must not
        get ahead of it: a rank that waits for pages makes no room for them."""
        watcher = self._watcher
        with self._together():
            watcher.plans.send(pack(WritePages(tuple(pages), self._flights.settled)))
            self._own.write(pages, cut(whole, self._shares[0]))
            for one in watcher.await_all(lambda one: one.awaits_pages):
                part = cut(whole, self._shares[one.rank]).contiguous()
                one.give_pages(bytearray(bytes_of(part)))
            watcher.await_all(lambda one: one.took_pages)

    @contextmanager
    def _together(self) -> Iterator[None]:
        """As with a step: whatever breaks off here, others may have done what rank 0 has not."""
        try:
            self._watcher.check()
            yield
        except Exception as failure:
            cause = self._watcher.give_up(failure)
            if isinstance(cause, EngineDead):
                raise cause from failure
            text = f"the ranks could not move pages: {type(cause).__name__}: {cause}"
            raise EngineDead(text) from failure

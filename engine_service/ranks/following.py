"""What every rank but the first does: load, then run the plans of rank 0 in their order.

It does not know requests, schedulers or what becomes of decisions.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from typing import Any, NamedTuple, NoReturn, cast

import torch

from engine_service.child import calm_the_collector
from engine_service.core.step import StepPlan
from engine_service.pipe import BlockingPipe, PeerGone, unpack
from engine_service.ranks.broadcast import Ended, Reader
from engine_service.ranks.group import OpenWorker, RankWorker, sizes_of
from engine_service.ranks.loading import Told
from engine_service.ranks.messages import (
    Failed,
    Here,
    Loaded,
    PagesAwaited,
    PagesGiven,
    PagesRead,
    PagesTaken,
    Ran,
    ReadPages,
    Start,
    WritePages,
)
from engine_service.worker.page_shares import bytes_of
from engine_service.worker.rank_pages import RankPages
from tidemill.runtime.errors import InternalError, ServiceError

_LOG = logging.getLogger("tidemill.rank")
_GLANCE_S = 2e-4
"""How often a timed step in flight is looked at while no plan comes."""


def follow(pipe: BlockingPipe, start: Start, plans: Reader, open_worker: OpenWorker) -> int:
    """Until rank 0 says that it is over; returns the exit status."""
    try:
        worker = _load(pipe, start, open_worker)
        calm_the_collector()
        pipe.send([Loaded(sizes_of(worker))])
        _run(worker, plans, pipe)
    except Ended as last:
        if reason := str(last):
            _LOG.error("rank 0 has ended: %s", reason)
        return 0
    except PeerGone:
        return 1
    except ServiceError as error:
        if start.place.num_here < start.place.size:  # rank 0 says it where it may not be read
            _LOG.error("this rank ends: %s", error)
        return _tell(pipe, Failed(error, is_verdict=True))
    except Exception as bug:
        _LOG.exception("this rank failed")
        wrapped = InternalError(f"{type(bug).__name__}: {bug}")
        return _tell(pipe, Failed(wrapped, is_verdict=False))


def _load(pipe: BlockingPipe, start: Start, open_worker: OpenWorker) -> RankWorker:
    told = Told(lambda stage: pipe.send([stage]))
    return open_worker(
        start.config,
        told.report,
        place=start.place,
        store=None,
        meet_now=lambda: pipe.send([Here()]),
    )


_Order = StepPlan | ReadPages | WritePages
"""What comes among the plans."""


class _Timed(NamedTuple):
    """A launched step of which somebody wants to know how long this rank took."""

    seq: int
    launched_ns: int
    done: torch.cuda.Event


class _Watch:
    """Tells rank 0 of timed steps; nobody waits for a device because of it."""

    def __init__(self, pipe: BlockingPipe) -> None:
        self._pipe = pipe
        self._open: deque[_Timed] = deque()

    def launched(self, seq: int, launched_ns: int, *, on_device: bool) -> None:
        """A timed step, behind its launch; without a device it is done by then."""
        if not on_device:
            self._pipe.send([Ran(seq, launched_ns, time.monotonic_ns())])
            return
        done = torch.cuda.Event()
        done.record()
        self._open.append(_Timed(seq, launched_ns, done))

    def look(self) -> bool:
        """Tells what is done; whether there is more to come."""
        while self._open and self._open[0].done.query():
            seq, launched_ns, _ = self._open.popleft()
            self._pipe.send([Ran(seq, launched_ns, time.monotonic_ns())])
        return bool(self._open)


def _run(worker: RankWorker, plans: Reader, pipe: BlockingPipe) -> NoReturn:
    """As many steps in flight as core.loop has, and none that it had collected when it planned the
    next, or moves pages. Decisions are collected for what collecting waits for and finds: what
    another stage decided, pinned memory that is free again, and the device's errors."""
    flights: deque[tuple[int, Any]] = deque()
    watch, on_device = _Watch(pipe), worker.facts().get("device", "").startswith("cuda")
    while True:
        plan = _next(plans, watch)
        while flights and flights[0][0] <= plan.settled:
            worker.collect(flights.popleft()[1])
        if not isinstance(plan, StepPlan):
            _move(worker.pages, plan, pipe)
            continue
        launched_ns = time.monotonic_ns() if plan.is_timed else 0
        flights.append((plan.seq, worker.launch(plan)))
        if plan.is_timed:
            watch.launched(plan.seq, launched_ns, on_device=on_device)
        if len(flights) > worker.depth:
            worker.collect(flights.popleft()[1])


def _move(own: RankPages, asked: ReadPages | WritePages, pipe: BlockingPipe) -> None:
    """In its place among the steps: those before it are launched, and none behind it. Those that
    rank 0 has collected are done here too: pages are moved beside the steps, and behind the keys of
    the last layer, in a step that decides nothing, no rank waits for another."""
    match asked:
        case ReadPages(pages):
            if not own.share.is_copy:
                pipe.send([PagesRead(bytearray(bytes_of(own.read(pages))))])
        case WritePages(pages):
            pipe.send([PagesAwaited()])
            (given,) = cast(list[PagesGiven], pipe.receive(None))
            own.write(pages, own.held.opened(given.content))
            pipe.send([PagesTaken()])


def _next(plans: Reader, watch: _Watch) -> _Order:
    """What rank 0 says next. Meanwhile timed steps in flight are looked at."""
    while watch.look():
        with contextlib.suppress(TimeoutError):
            return cast(_Order, unpack(plans.receive(_GLANCE_S)))
    return cast(_Order, unpack(plans.receive()))


def _tell(pipe: BlockingPipe, failed: Failed) -> int:
    try:
        pipe.send([failed])
    except PeerGone:
        _LOG.error("rank 0 is gone")
    return 1

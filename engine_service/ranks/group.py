"""Several ranks behind `Executor`: rank 0 tells the others each plan and runs it itself.

All inputs of a step are in its plan, and random numbers are stateless, so ranks that launch the
same plans in the same order compute the same tokens: nothing comes back but rank 0's decisions. It
does not know models; workers are handed in.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any, Protocol

import torch
import torch.distributed as dist

from engine_service.config import EngineConfig
from engine_service.core.step import Decisions, StepPlan
from engine_service.core.strategy import Executor
from engine_service.distributed import Store, abort_all, open_store
from engine_service.peers import release_all
from engine_service.pipe import pack
from engine_service.place import Place
from engine_service.ranks.group_pages import Flights, GroupPages
from engine_service.ranks.hosts import Hosts
from engine_service.ranks.loading import Loading, Report
from engine_service.ranks.messages import Loaded, Start
from engine_service.ranks.processes import FOLLOWER_MODULE, FollowerProcess
from engine_service.ranks.watcher import OnLost, Watcher
from engine_service.worker.rank_pages import RankPages
from tidemill.runtime.errors import FailedPrecondition, ServiceError

_AWAY_S = 300.0
_LEAVING_S = 10.0
_LOG = logging.getLogger("tidemill.rank")
_SIZES = ("num_pages", "page_size", "max_rows", "max_model_len", "dtype", "weight_version")
"""Facts that must be the same on all ranks. `worker.alike` asks for most of them before."""


class RankWorker(Executor, Protocol):
    """What every rank runs."""

    @property
    def pages(self) -> RankPages:
        """What it holds of the KV."""

    def facts(self) -> dict[str, Any]:
        """What loading has found."""

    def close(self) -> None:
        """Behind the last step."""


class OpenWorker(Protocol):
    """Loads a rank's worker. Calls `meet_now` when all that it needs for meeting the others is
    there; it returns when they are there too. `store` is rank 0's own."""

    def __call__(
        self,
        config: EngineConfig,
        report: Report,
        *,
        place: Place,
        store: Any,
        meet_now: Callable[[], object],
    ) -> RankWorker: ...


class RankGroup:
    """Implements core.strategy.Executor. `own` is rank 0's worker; `rank_times` gives what the
    others have told of timed steps; `close` ends the followers, as does whatever ends this object
    or its process."""

    def __init__(
        self, own: RankWorker, watcher: Watcher, hosts: Hosts, num_stages: int = 1
    ) -> None:
        self.own = own
        self.limits = own.limits
        self.depth = own.depth
        self._watcher = watcher
        self._num_stages = num_stages
        self._flights = Flights()
        self.rank_times = watcher.take_times
        self.close = weakref.finalize(self, _close, watcher, hosts, own, os.getpid())

    def away(self) -> AbstractContextManager[None]:
        """Around what holds rank 0's interpreter for seconds, as others take silence for its end; a
        profile's end does so. Up to `_AWAY_S`."""
        return self._watcher.plans.away(_AWAY_S)

    @cached_property
    def pages(self) -> GroupPages:
        """Those of the whole model."""
        return GroupPages(self.own.pages, self._watcher, self._num_stages, self._flights)

    def launch(self, plan: StepPlan) -> Any:
        """Raises EngineDead once a follower is lost, saying which and why."""
        self._watcher.check()
        try:
            # Whatever breaks off here, followers may have been told what rank 0 does not do.
            self._watcher.plans.send(pack(plan))
            self._flights.launch(plan.seq)
            return self.own.launch(plan)
        except BaseException as failure:
            raise self._watcher.give_up(failure) from failure

    def collect(self, handle: Any) -> Decisions:
        """Raises what `launch` raises."""
        try:
            decisions = self.own.collect(handle)
            # A device that was made to wait no longer hands over whatever lay there.
            self._watcher.check()
        except Exception as failure:
            raise self._watcher.explain(failure) from failure
        self._flights.collect()
        return decisions


def open_group(
    config: EngineConfig,
    num_ranks: int,
    report: Report,
    *,
    open_worker: OpenWorker,
    hosts: Hosts,
    on_lost: OnLost | None = None,
    module: str = FOLLOWER_MODULE,
) -> RankGroup:
    """Starts the followers and loads all ranks; raises what any of them raises.

    `on_lost` hears of a loss at any time and may end the process. Without one nothing happens to
    the process: whatever runs next raises, a collective that waits for ever included.
    """
    _refuse_second_group()
    hosts.gather(report)
    meeting: list[Any] = []

    def told(error: ServiceError) -> None:
        if on_lost is not None:
            on_lost(error)
            return
        meeting.clear()  # or this process waits there for who never comes
        _abort_collectives(error)

    watcher = Watcher(num_ranks - 1, on_lost=told, module=module, start=hosts.start)
    try:
        watcher.open()
        store, port = _open_meeting(meeting, hosts)
        for rank in range(1, num_ranks):
            place = hosts.place(rank, port)
            watcher.tell(rank, Start(config, place, ends_silent_leader=on_lost is not None))
        loading = Loading(report, watcher)
        own = open_worker(
            config,
            loading.tell,
            place=hosts.place(0, port),
            store=store,
            meet_now=lambda: watcher.await_all(lambda one: one.here),
        )
        report("ranks", 0, 0)
        _compare(watcher.await_all(lambda one: one.loaded), sizes_of(own))
    except BaseException as failure:
        cause = watcher.give_up(failure)
        _close(watcher, hosts)
        if cause is failure:
            raise
        raise cause from failure
    return RankGroup(own, watcher, hosts, config.pipeline_parallel_size)


def _open_meeting(meeting: list[Any], hosts: Hosts) -> tuple[Store, int]:
    """Rank 0's way to the ranks' store, and its port; `meeting` alone keeps it open."""
    server, store, port = open_store(hosts.listen())
    meeting.append(server)
    return store, port


def _refuse_second_group() -> None:
    if dist.is_initialized():
        raise FailedPrecondition(
            "this process is in a group of torch.distributed already, another LLM of several ranks'"
            " or its own, and there is one to a process: close that first, or use another process",
            reason="RANKS_TAKEN",
            param="tensor_parallel_size",
        )


def sizes_of(worker: RankWorker) -> dict[str, Any]:
    """What a follower tells with Loaded."""
    facts = worker.facts()
    return {name: facts[name] for name in _SIZES if name in facts}


def _compare(followers: list[FollowerProcess], own: dict[str, Any]) -> None:
    for follower in followers:
        theirs = (follower.loaded or Loaded({})).sizes
        for name in own | theirs:
            if own.get(name) != theirs.get(name):
                raise FailedPrecondition(
                    f"{follower.name} has {name} {theirs.get(name)!r}, rank 0 {own.get(name)!r}: "
                    "all ranks need the same files, devices and versions",
                    reason="RANKS_DIFFER",
                )


def _abort_collectives(error: ServiceError | None = None, *, waits: bool = False) -> None:
    """Where a device waits for a rank that is gone, it waits for ever; on the CPU the end of the
    others' connections is heard."""
    release_all()
    if torch.cuda.is_available() and dist.is_initialized():
        abort_all(waits=waits)


def _close(
    watcher: Watcher, hosts: Hosts, own: RankWorker | None = None, pid: int | None = None
) -> None:
    """What a device still waits for of followers that were killed is given up before the device is
    waited for; others leave by themselves, behind rank 0. Nothing, in another process than `pid`:
    a copy of it that ends, without its threads."""
    if pid not in (None, os.getpid()):
        return
    is_lost = watcher.is_lost
    if is_lost or watcher.has_given_up:
        _abort_collectives()
    if not is_lost and own is not None:
        own.close()
    watcher.close()
    hosts.close()
    if is_lost:
        _within(_LEAVING_S, lambda: _leave(own))
    else:
        _leave()


def _leave(own: RankWorker | None = None) -> None:
    """Of the library's groups. NCCL takes no leave while there are graphs with its kernels, which
    end with `own`, and none of ranks that are gone: what they shared is aborted."""
    if own is not None:
        own.close()
    if dist.is_initialized():
        _abort_collectives(waits=True)
        dist.destroy_process_group()


def _within(seconds: float, leave: Callable[[], None]) -> None:
    """A device may be what the group was lost to: a program waits no longer than this for it. Not
    left at all is worse: what aborts the groups would wait until the interpreter ends, and end the
    process there."""
    faults = ["the device does not answer"]

    def run() -> None:
        try:
            leave()
            faults.clear()
        except Exception as error:
            faults[:] = [f"{type(error).__name__}: {error}"]

    thread = threading.Thread(target=run, name="leave", daemon=True)
    thread.start()
    thread.join(seconds)
    for fault in faults[:]:
        _LOG.warning("what the lost group shared is left as it is: %s", fault)

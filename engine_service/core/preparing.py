"""Requests whose grammars are being compiled: not queued yet, and no step waits for them.

It does not know what a grammar is made of, nor the queue.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from typing import NamedTuple

from engine_service.core.messages import Abort, Submit
from tidemill.runtime.errors import DeadlineExceeded


class Prepared(NamedTuple):
    """A request that may be queued now, unless `failure` says why not; `aborts` came meanwhile."""

    submit: Submit
    failure: BaseException | None
    aborts: list[Abort]


class Preparing:
    """add, abort, take. A request that was added is taken once, at its deadline at the latest, and
    without its grammar where nobody wants it any more."""

    def __init__(self) -> None:
        self._waiting: dict[int, tuple[Submit, Future[None], list[Abort]]] = {}
        self._left: list[Future[None]] = []

    def __len__(self) -> int:
        """Grammars that are being compiled, also those that nobody waits for any more."""
        self._left = [job for job in self._left if not job.done()]
        return len(self._waiting) + len(self._left)

    def add(self, submit: Submit, job: Future[None]) -> None:
        """`job` compiles its grammar."""
        self._waiting[submit.key] = (submit, job, [])

    def abort(self, abort: Abort) -> bool:
        """Keeps an abort for a request that is here; False for others."""
        waiting = self._waiting.get(abort.key)
        if waiting is not None:
            waiting[2].append(abort)
        return waiting is not None

    def take(self, now_ns: int, *, all_of_them: bool = False) -> list[Prepared]:
        """Those that are done or aborted, and those whose deadline has passed, which is their
        failure; with `all_of_them` the others too, as if they were done.

        A grammar that nobody waits for is not compiled, unless that has begun: it cannot be
        stopped, and counts as long as it takes its thread from others.
        """
        taken = []
        for key, (submit, job, aborts) in list(self._waiting.items()):
            is_late = submit.deadline_ns is not None and submit.deadline_ns <= now_ns
            if not (job.done() or aborts or is_late or all_of_them):
                continue
            del self._waiting[key]
            if job.done():
                taken.append(Prepared(submit, job.exception(), aborts))
                continue
            if not job.cancel():
                self._left.append(job)
            late = DeadlineExceeded("the deadline has passed while its grammar was compiled")
            # Whoever is queued to be ended would compile it in the loop, where steps wait for it.
            ended = replace(submit, constraint=None) if aborts else submit
            taken.append(Prepared(ended, late if is_late else None, aborts))
        return taken

"""Requests whose grammars are being compiled: not queued yet, and no step waits for them.

It does not know what a grammar is made of, nor the queue.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import NamedTuple

from engine_service.core.messages import Abort, Submit


class Prepared(NamedTuple):
    """A request that may be queued now, unless `failure` says why not; `aborts` came meanwhile."""

    submit: Submit
    failure: BaseException | None
    aborts: list[Abort]


class Preparing:
    """add, abort, take. Every request that was added is taken once."""

    def __init__(self) -> None:
        self._waiting: dict[int, tuple[Submit, Future[None], list[Abort]]] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, submit: Submit, job: Future[None]) -> None:
        """`job` compiles its grammar."""
        self._waiting[submit.key] = (submit, job, [])

    def abort(self, abort: Abort) -> bool:
        """Keeps an abort for a request that is here; False for others."""
        waiting = self._waiting.get(abort.key)
        if waiting is not None:
            waiting[2].append(abort)
        return waiting is not None

    def take(self, *, all_of_them: bool = False) -> list[Prepared]:
        """Those that are done; with `all_of_them` the others too, as if they were."""
        done = [key for key, (_, job, _) in self._waiting.items() if all_of_them or job.done()]
        taken = [self._waiting.pop(key) for key in done]
        return [
            Prepared(submit, job.exception() if job.done() else None, aborts)
            for submit, job, aborts in taken
        ]

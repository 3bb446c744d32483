"""Whether all followers live and do what they should: a thread of rank 0 that does nothing else.

It sees processes end, hears what they say and counts their silence, and pronounces the group lost
even while the main thread waits for a rank that will never answer. It does not know what is
computed; what becomes of its own process is for its owner to say.
"""

from __future__ import annotations

import itertools
import logging
import os
import select
import threading
import time
from collections.abc import Callable
from typing import Any

from engine_service.core.messages import RankTrace
from engine_service.ranks.broadcast import Writer
from engine_service.ranks.messages import Failed
from engine_service.ranks.processes import FOLLOWER_MODULE, FollowerProcess, StartRank
from engine_service.ranks.silence import TICK_S, Silence
from tidemill.runtime.errors import EngineDead, InternalError, ServiceError

LEAVING_S = 4.0
"""For followers to leave by themselves; the engine server gives rank 0 a second more. Who is killed
first makes the rank on another host take a clean end for a lost host."""

_SETTLING_S = 1.5
"""What one rank's end does to the others may be seen before that end itself is."""
_LOOKS = 5
_EXPLAINED_S = 3.0
_LOG = logging.getLogger("tidemill.rank")

OnLost = Callable[[ServiceError], None]
"""Hears, in the watcher's thread, why the group is lost; the followers have been killed."""


class Watcher:
    """open, tell, await_all, check, explain, give_up, close. `plans` reaches all followers."""

    def __init__(
        self,
        num_followers: int,
        *,
        on_lost: OnLost,
        module: str = FOLLOWER_MODULE,
        start: StartRank = FollowerProcess,
    ) -> None:
        self.plans = Writer(num_followers, check=self.check)
        self._num_followers = num_followers
        self._on_lost = on_lost
        self._module = module
        self._start_rank = start
        self.followers: list[FollowerProcess] = []
        self._silences = [Silence() for _ in range(num_followers)]
        self._poll = select.poll()
        self._changed = threading.Condition()
        self._error: ServiceError | None = None
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._is_open = False
        self._is_closing = False
        self._closed_by = "the engine has been closed"
        self._grace_s = LEAVING_S
        # The followers die with this thread, which lives as long as the group; a user's thread
        # that makes an LLM may end before.
        self._thread = threading.Thread(target=self._run, name="ranks", daemon=True)

    def open(self) -> None:
        """Returns when all followers have been started."""
        self._thread.start()
        with self._changed:
            self._changed.wait_for(lambda: self._is_open or self._error)
        self.check()

    def tell(self, rank: int, message: Any) -> None:
        self.followers[rank - 1].tell(message)

    def await_all(
        self,
        condition: Callable[[FollowerProcess], object],
        *,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> list[FollowerProcess]:
        """Waits until it holds for all followers; raises the group's loss. `meanwhile` is called
        when something about them may have changed."""
        with self._changed:
            while not (self._error or all(map(condition, self.followers))):
                self._changed.wait()
                meanwhile()
        self.check()
        return self.followers

    def take_times(self) -> list[RankTrace]:
        """What followers have told of timed steps since the last time. Never waits."""
        return [
            RankTrace(told.seq, one.rank, told.launched_ns, told.done_ns)
            for one in self.followers
            for told in [one.times.popleft() for _ in range(len(one.times))]
        ]

    @property
    def is_lost(self) -> bool:
        """Whether some follower is no more, or does not answer."""
        return self._error is not None

    @property
    def has_given_up(self) -> bool:
        """Whether rank 0 has ended the group, and all followers with it."""
        return self._grace_s == 0.0

    def check(self) -> None:
        """Raises why the group is lost, if it is."""
        if self._error is not None:
            raise self._error
        if self._is_closing:
            raise EngineDead(self._closed_by)

    def explain(self, failure: BaseException) -> BaseException:
        """What is behind a failure of rank 0 itself: its peers' loss, if they are lost too."""
        if isinstance(failure, Exception) and not isinstance(failure, ServiceError):
            with self._changed:
                self._changed.wait_for(lambda: self._error, _EXPLAINED_S)
        return self._error or failure

    def give_up(self, failure: BaseException) -> BaseException:
        """Rank 0 has not done what the others do: the group ends, without grace. Returns the cause,
        as `explain` does."""
        cause = self.explain(failure)
        self._closed_by = f"rank 0 failed: {type(cause).__name__}: {cause}"
        self._grace_s = 0.0
        self._start_closing()
        return cause

    def close(self) -> None:
        """Followers leave, or are killed; then nothing of them is left. Once."""
        self._start_closing()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _start_closing(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            os.eventfd_write(self._wake, 1)

    # ------------------------------------------------------------ the watcher's own thread

    def _run(self) -> None:
        try:
            self._start()
            self._watch()
        except Exception as bug:
            _LOG.exception("watching the ranks failed")
            self._lose(InternalError(f"watching the ranks failed: {type(bug).__name__}: {bug}"))
        while not self._is_closing:  # the main thread may still write to what is closed here
            os.eventfd_read(self._wake)
        self._bury()

    def _start(self) -> None:
        self._poll.register(self._wake, select.POLLIN)
        for index in range(self._num_followers):
            follower = self._start_rank(index + 1, self.plans.wires(index), self._module)
            self.followers.append(follower)
            follower.watch(self._poll)
        with self._changed:
            self._is_open = True
            self._changed.notify_all()

    def _watch(self) -> None:
        looked = time.monotonic()
        while not self._is_closing:
            self._look(TICK_S)
            self.plans.beat()
            now = time.monotonic()
            serves = all(one.loaded for one in self.followers)
            for index, silence in enumerate(self._silences):
                silence.look(self.plans.reader_beat(index), now - looked, serves=serves)
            looked = now
            if not self._is_closing and self._is_hurt():
                self._settle()
                self._lose(self._verdict())
                return

    def _look(self, timeout_s: float) -> None:
        self._poll.poll(timeout_s * 1e3)
        with self._changed:
            for follower in self.followers:
                follower.look(self._poll)
            self._changed.notify_all()

    def _silent(self) -> list[tuple[FollowerProcess, float]]:
        pairs = zip(self.followers, self._silences, strict=True)
        return [(one, silence.seconds) for one, silence in pairs if silence.is_long]

    def _is_hurt(self) -> bool:
        return any(one.has_ended or one.failed for one in self.followers) or bool(self._silent())

    def _has_cause(self) -> bool:
        """Whether something is known that is no mere consequence of another rank's end."""
        known = any(
            (one.failed and one.failed.is_verdict) or _killed(one) for one in self.followers
        )
        return known or bool(self._silent())

    def _settle(self) -> None:
        deadline = time.monotonic() + _SETTLING_S
        for seen in itertools.count():  # this process may itself have stood still until then
            left = deadline - time.monotonic()
            if self._has_cause() or (left <= 0 and seen >= _LOOKS):
                return
            self._look(max(0.0, min(left, 0.02)))

    def _verdict(self) -> ServiceError:
        """The likeliest cause first."""
        failed = [(one, one.failed) for one in self.followers if one.failed]
        for follower, told in failed:
            if told.is_verdict:
                return _told_by(follower, told)
        for follower in self.followers:
            if _killed(follower):
                return self._loss(follower.describe_end())
        for follower, seconds in self._silent():
            text = f"has shown no life for {seconds:.1f} s{follower.stage}"
            return self._loss(f"{follower.name} {text}: {follower.doubt}")
        for follower, told in failed:
            return _told_by(follower, told)
        return self._loss(next(one for one in self.followers if one.has_ended).describe_end())

    def _loss(self, what: str) -> EngineDead:
        return EngineDead(f"{what}; the group of {self._num_followers + 1} ranks ends with it")

    def _lose(self, error: ServiceError) -> None:
        """The followers first: whoever waits for one of them in a collective then hears of it."""
        for follower in self.followers:
            follower.kill()
        with self._changed:
            self._error = error
            self._changed.notify_all()
        self._on_lost(error)

    def _bury(self) -> None:
        deadline = time.monotonic() + self._grace_s
        if self._error is None and self._grace_s:
            self.plans.end()
        while (left := deadline - time.monotonic()) > 0:
            if self._error is not None or all(one.has_ended for one in self.followers):
                break
            self._look_for_ends(left)
        for follower in self.followers:
            follower.kill()
        for follower in self.followers:
            follower.close()
        self.plans.close()
        os.close(self._wake)

    def _look_for_ends(self, left_s: float) -> None:
        poll = select.poll()
        for follower in self.followers:
            if not follower.has_ended:
                poll.register(follower.pidfd, select.POLLIN)
        poll.poll(left_s * 1e3)
        for follower in self.followers:
            follower.look(self._poll)


def _killed(follower: FollowerProcess) -> bool:
    return follower.code is not None and follower.code < 0


def _told_by(follower: FollowerProcess, told: Failed) -> ServiceError:
    error = told.error
    return type(error)(
        f"{follower.name}: {error.message}",
        reason=error.reason,
        param=error.param,
        retry_after_ms=error.retry_after_ms,
        facts=error.facts,
    )

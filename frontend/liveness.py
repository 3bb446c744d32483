"""Whether an engine behind an open session still lives. It does not know the session.

Whatever it sends is a sign of life: pongs three times a second, and load reports twice, which say
too how long the engine's core has been silent although it has work.
"""

from __future__ import annotations

import asyncio

from tidemill.runtime.errors import InvalidRequest

_TICK_S = 0.25
SIGN_S = 0.3
"""A frontend sends something this often: only what was sent can stay unacknowledged."""
UNANSWERED_MS = 1000
"""A host that acknowledges nothing for so long is cut off, whether its engine lives or not. Linux
sends again after 0.2, 0.4 and 0.85 s and counts from the second of these: 1.2 s would be no more
tries, only the same verdict later."""
_LEAST_S = 1.0
"""Of two reports one may be late."""
_DOUBT = 0.5
"""After this share of the silence that means its end an engine gets no new work: what would wait
for its first token is still here."""
_STUCK_S = 6.0
"""A core that has work and says nothing for so long gets no new work either, whatever the engine
makes of it (its --heartbeat-timeout-s)."""
_GIVE_UP_S = 30.0
"""What a stuck core has is given up. A long step may take as long as that, on a slow machine."""


def checked_silence(silence_s: float) -> float:
    """The same; raises InvalidRequest for less than engines take from report to report."""
    if silence_s >= _LEAST_S:
        return silence_s
    raise InvalidRequest(
        f"engine_silence_s is {silence_s:g}; it must be at least {_LEAST_S:g}",
        param="engine_silence_s",
    )


class Liveness:
    """Of one session."""

    def __init__(self, silence_s: float) -> None:
        """`silence_s` without a frame mean that the engine is gone."""
        self._silent_s = 0.0
        self.silence_s = silence_s
        self._core_silence_s = 0.0
        self._is_stalled = False

    async def watch(self, reading: asyncio.Task[None]) -> None:
        """Ends as `reading` does, which tells what is heard; TimeoutError when nothing is."""
        clock = asyncio.get_running_loop().time
        looked = clock()
        while not (await asyncio.wait({reading}, timeout=_TICK_S))[0]:
            looked, before = clock(), looked
            self.passed(looked - before)
            if self._silent_s >= self.silence_s:
                raise TimeoutError
        await reading

    def heard(self) -> None:
        """A frame has come."""
        self._silent_s = 0.0

    def passed(self, seconds: float) -> None:
        """Time since the last look. Of a long one only two ticks count: it was this process that
        slept, and what came meanwhile has yet to be read."""
        self._silent_s += min(seconds, 2 * _TICK_S)

    def reported(self, core_silence_s: float, *, is_stalled: bool) -> None:
        """A load report has come; the engine has an opinion of its own."""
        self._core_silence_s, self._is_stalled = core_silence_s, is_stalled

    @property
    def is_hopeless(self) -> bool:
        """Whether the core has been stuck for too long for its requests to wait on."""
        return self._core_silence_s > _GIVE_UP_S

    def doubt(self) -> str:
        """Who says nothing although it should; '' when all is well."""
        if self._silent_s > _DOUBT * self.silence_s:
            return f"no sign of life for {self._silent_s:.1f} s"
        if self._is_stalled or self._core_silence_s > _STUCK_S:
            return f"its core has said nothing for {self._core_silence_s:.1f} s"
        return ""

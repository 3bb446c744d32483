"""Whether an engine behind an open session still lives. It does not know the session.

Load reports are its heartbeat, twice a second; they say too how long the engine's core has been
silent although it has work.
"""

from __future__ import annotations

from tidemill.runtime.errors import InvalidRequest

SIGN_S = 0.3
"""A frontend sends something this often: only what was sent can stay unacknowledged."""
UNANSWERED_MS = 1200
"""A host that acknowledges nothing for so long is cut off, whether its engine lives or not."""
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
    """Of one session. Times are seconds of the event loop's clock."""

    def __init__(self, now: float, silence_s: float) -> None:
        """`silence_s` without a frame mean that the engine is gone."""
        self._heard = now
        self.silence_s = silence_s
        self._core_silence_s = 0.0
        self._is_stalled = False

    def heard(self, now: float) -> None:
        """A frame has come."""
        self._heard = now

    def reported(self, core_silence_s: float, *, is_stalled: bool) -> None:
        """A load report has come; the engine has an opinion of its own."""
        self._core_silence_s, self._is_stalled = core_silence_s, is_stalled

    def excuse(self, seconds: float) -> None:
        """It was this process that slept."""
        self._heard += seconds

    @property
    def is_hopeless(self) -> bool:
        """Whether the core has been stuck for too long for its requests to wait on."""
        return self._core_silence_s > _GIVE_UP_S

    def doubt(self, now: float) -> str:
        """Who says nothing although it should; '' when all is well."""
        if now - self._heard > _DOUBT * self.silence_s:
            return f"no sign of life for {now - self._heard:.1f} s"
        if self._is_stalled or self._core_silence_s > _STUCK_S:
            return f"its core has said nothing for {self._core_silence_s:.1f} s"
        return ""

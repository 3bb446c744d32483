"""W3C trace context, given explicitly and never taken from the surroundings.

It does not know spans.
"""

from __future__ import annotations

import re
import time
from typing import NamedTuple

_HEADER = re.compile(
    r"(?!ff)(?!00.{53}.)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?"
)
"""Version 00 ends behind its flags; later ones may go on."""
_MAX_STATE_CHARS = 512
"""What everybody passes on at least; a longer tracestate is dropped, which the standard allows."""


class TraceContext(NamedTuple):
    """One place in a trace, as `traceparent` and `tracestate` carry it between services."""

    trace_id: int
    span_id: int
    sampled: bool
    state: str = ""

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{int(self.sampled):02x}"

    @property
    def ids(self) -> dict[str, str]:
        """What a log line, or an exemplar, says of it."""
        return {"trace_id": f"{self.trace_id:032x}", "span_id": f"{self.span_id:016x}"}


def parse(traceparent: str, tracestate: str = "") -> TraceContext | None:
    """None for an absent or malformed header, which starts a new trace (W3C trace-context 1)."""
    found = _HEADER.fullmatch(traceparent.strip())
    if found is None:
        return None
    trace_id, span_id, flags = (int(part, 16) for part in found.groups())
    if not trace_id * span_id:
        return None
    state = tracestate if len(tracestate) <= _MAX_STATE_CHARS else ""
    return TraceContext(trace_id, span_id, bool(flags & 1), state)


def exemplar(context: TraceContext | None) -> dict[str, str] | None:
    """What a histogram keeps of the request it counted last; None where nobody could look it up."""
    return context.ids if context is not None and context.sampled else None


def epoch_offset_ns() -> int:
    """What turns a monotonic time into a wall-clock one, as the wall clock stands now."""
    return time.time_ns() - time.monotonic_ns()


def epoch_ns(monotonic_ns: int) -> int:
    """Wall-clock time of a monotonic one; calibrated anew, because clocks are slewed."""
    return epoch_offset_ns() + monotonic_ns

"""The figures of one point: what its answers were, seen from a window of time.

Latencies are those of requests that were due in the window, counted from when they were due; rates
count what came in the window, whenever it was asked for. It does not know how requests were made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from tidemill.bench.percentiles import PERCENTS, percentiles_ms
from tidemill.bench.traffic.answer import Answer


class Window(NamedTuple):
    """CLOCK_MONOTONIC seconds."""

    began: float
    ended: float

    @property
    def seconds(self) -> float:
        return self.ended - self.began

    def has(self, when: float) -> bool:
        return self.began <= when < self.ended


class Slo(NamedTuple):
    """What a request has to keep to be good, in milliseconds; None: anything will do."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None

    @property
    def asks_for_anything(self) -> bool:
        return any(bound is not None for bound in self)

    def is_kept(self, answer: Answer) -> bool:
        """By an answer that is complete."""
        seen = (answer.first_s, answer.per_token_s, answer.total_s)
        pairs = zip(seen, self, strict=True)
        kept = (None in pair or 1e3 * pair[0] <= pair[1] for pair in pairs)  # type: ignore[operator]
        return answer.is_ok and all(kept)


def figures(answers: Sequence[Answer], window: Window, slo: Slo) -> dict[str, Any]:
    """Rates per second, times in milliseconds; `client_cpu_share` is the caller's to add."""
    due = [answer for answer in answers if window.has(answer.due)]
    good = [answer for answer in due if answer.is_ok]
    ended = [answer for answer in answers if answer.is_ok and window.has(answer.ended)]
    refused = [answer for answer in due if answer.is_refused]
    chunks = sum(len(answer.chunks) for answer in good)
    gaps = [gap for answer in good for gap in answer.gaps_s()]
    paces = [pace for answer in good if (pace := answer.per_token_s) is not None]
    found: dict[str, Any] = {
        "seconds": round(window.seconds, 3),
        "requests": len(due),
        "ok": len(good),
        "begun_per_s": round(len(due) / window.seconds, 3),
        "answered_per_s": round(len(ended) / window.seconds, 3),
        "input_tokens_per_s": round(sum(a.input_tokens for a in ended) / window.seconds, 1),
        "output_tokens_per_s": round(
            sum(a.tokens_in(window.has) for a in answers) / window.seconds, 1
        ),
        "ttft_ms": _percentiles([answer.first_s for answer in good]),
        "tpot_ms": _percentiles(paces),
        "itl_ms": _percentiles(gaps),
        "e2e_ms": _percentiles([answer.total_s for answer in good]),
        "tokens_per_chunk": round(sum(a.output_tokens for a in good) / max(1, chunks), 3),
        "failures": _failures(due),
        "refused": {"requests": len(refused), "ms": _percentiles([a.total_s for a in refused])},
        "moved": sum(answer.was_moved for answer in due),
        "lag_ms": _percentiles([answer.lag_s for answer in due]),
    }
    if slo.asks_for_anything:
        kept = sum(map(slo.is_kept, due))
        found["goodput_per_s"] = round(kept / window.seconds, 3)
        found["good_share"] = round(kept / max(1, len(due)), 4)
    return found


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    return percentiles_ms(seconds, PERCENTS)


def _failures(due: Sequence[Answer]) -> dict[str, dict[str, Any]]:
    """By status: how many, and what the server said the first time."""
    counts = Counter(answer.status for answer in due if not answer.is_ok)
    said = {answer.status: answer.said for answer in reversed(due)}
    return {
        status: {"requests": count, "said": said[status]} for status, count in counts.most_common()
    }

"""The unmask rules written down from their definitions, one position after the other.

Nothing of the engine is in here; what a step shows comes in as Python lists. Places are those of
the open positions from left to right.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

START = 0.3
"""The adaptive rule's threshold when a block begins."""

READS = {
    "threshold": ("threshold",),
    "factor": ("factor",),
    "entropy_bound": ("entropy_bound",),
    "low_confidence": ("steps",),
    "low_confidence_static": ("steps",),
    "low_confidence_dynamic": ("threshold", "steps"),
    "sequential": ("steps",),
    "random": ("steps",),
    "maskgit_plus": ("steps", "alg_temp"),
    "topk_margin": ("steps", "alg_temp"),
    "entropy": ("steps", "alg_temp"),
    "origin": ("steps",),
    "adaptive": ("max_parallel", "start_threshold"),
    "prefix": ("threshold",),
    "hierarchical": ("threshold", "low_threshold"),
}
"""Rules, and the knobs that they look at."""

DREAM = ("maskgit_plus", "topk_margin", "entropy", "origin")
"""Rules of which a step may reveal nothing."""


@dataclass(frozen=True, kw_only=True)
class Shown:
    """What a step says of the open positions, from left to right."""

    positions: list[int]
    """Ascending; adjacent open positions differ by one."""
    confidence: list[float]
    margin: list[float]
    entropy: list[float]
    uniform: list[float]


def slow_rule(
    shown: Shown, *, num_masks: int, step: int, knobs: dict[str, Any], adapted: float = START
) -> list[int]:
    """Places that fall in step `step` of a block that began with `num_masks`. `knobs` is complete
    for its rule; `adapted` is the adaptive rule's present threshold."""
    rule = knobs["remasking"]
    if rule in DREAM:
        return _dream(shown, step, knobs)
    if rule == "hierarchical":
        return _hierarchical(shown, knobs["threshold"], knobs["low_threshold"])
    confidence = shown.confidence
    surest_first = _descending(confidence)
    if rule in ("low_confidence", "low_confidence_static"):
        return surest_first[: _share(num_masks, knobs["steps"], step)]
    if rule == "sequential":
        return list(range(len(confidence)))[: _share(num_masks, knobs["steps"], step)]
    if rule == "random":
        return _descending(shown.uniform)[: _share(num_masks, knobs["steps"], step)]
    if rule == "threshold":
        return [i for i, c in enumerate(confidence) if c >= knobs["threshold"]] or surest_first[:1]
    if rule == "low_confidence_dynamic":
        above = [i for i, c in enumerate(confidence) if c > knobs["threshold"]]
        share = _share(num_masks, knobs["steps"], step)
        return above if len(above) >= share else surest_first[:share]
    if rule == "adaptive":
        above = [i for i in surest_first if confidence[i] >= adapted]
        return above[: knobs["max_parallel"]] or surest_first[:1]
    if rule == "prefix":
        sure = [c >= knobs["threshold"] for c in confidence]
        return list(range(max(1, sure.index(False) if False in sure else len(sure))))
    if rule == "factor":
        holds = [
            n
            for n, i in enumerate(surest_first, 1)
            if confidence[i] >= 1 - knobs["factor"] / (n + 1)
        ]
        return surest_first[: max(holds, default=1)]
    assert rule == "entropy_bound", rule
    return _entropy_bounded(shown.entropy, knobs["entropy_bound"])


def slow_adapt(adapted: float, taken: int, num_open: int) -> float:
    """The adaptive rule's threshold after a step."""
    if taken / num_open > 0.7:
        return min(0.9, adapted + 0.05)
    if taken / num_open < 0.3:
        return max(0.1, adapted - 0.05)
    return adapted


def _descending(values: list[float]) -> list[int]:
    return sorted(range(len(values)), key=lambda i: (-values[i], i))


def _share(num_masks: int, steps: int, step: int) -> int:
    """LLaDA's get_num_transfer_tokens; more steps than masks leave some without one."""
    shares = [num_masks // steps] * steps
    for i in range(num_masks % steps):
        shares[i] += 1
    return max(1, shares[step]) if step < steps else 1


def _dream(shown: Shown, step: int, knobs: dict[str, Any]) -> list[int]:
    """Dream's _sample: the times are spelled out as a list."""
    steps, num_open = knobs["steps"], len(shown.positions)
    times = [1 + (1e-3 - 1) * i / steps for i in range(steps + 1)]
    is_last = step == steps - 1
    rate = 1.0 if is_last else 1 - times[step + 1] / times[step]
    if knobs["remasking"] == "origin":
        return [i for i, u in enumerate(shown.uniform) if u >= 1 - rate]
    count = num_open if is_last else math.floor(num_open * rate)
    measure = {
        "maskgit_plus": shown.confidence,
        "topk_margin": shown.margin,
        "entropy": [-e for e in shown.entropy],
    }[knobs["remasking"]]
    warmth = knobs["alg_temp"]
    if warmth > 0:
        noise = [-math.log(-math.log(u)) for u in shown.uniform]
        measure = [m / warmth + n for m, n in zip(measure, noise, strict=True)]
    return _descending(measure)[:count]


def _entropy_bounded(entropy: list[float], bound: float) -> list[int]:
    taken, total = [], 0.0
    for i in sorted(range(len(entropy)), key=lambda i: (entropy[i], i)):
        if total > bound:
            break
        taken.append(i)
        total += entropy[i]
    return taken


def _hierarchical(shown: Shown, threshold: float, low_threshold: float) -> list[int]:
    """Recursion made flat: every run of neighbours gives its best, if that is sure enough."""
    runs: list[list[int]] = []
    for i, position in enumerate(shown.positions):
        if i and position == shown.positions[i - 1] + 1:
            runs[-1].append(i)
        else:
            runs.append([i])
    confidence = shown.confidence
    taken = {i for i, c in enumerate(confidence) if c > threshold}
    for run in runs:
        best = min(run, key=lambda i: (-confidence[i], i))
        if confidence[best] > low_threshold:
            taken.add(best)
    return sorted(taken) or _descending(confidence)[:1]

"""How many positions of a block are open after a step, where its rule says so beforehand.

The host half of what `unmask` counts on the device: a rule with a schedule, or one that takes a
single position, opens as many whatever the model computes, so that the next step can be planned
while this one runs. It does not know tokens, tensors or canvases.
"""

from __future__ import annotations

from math import floor

from engine_service.decoding.reveal_knobs import RevealKnobs
from engine_service.decoding.rules import RULES, Count
from engine_service.decoding.unmask import DREAM_EPS


def left_open(knobs: RevealKnobs, num_open: int, *, step: int, steps: int) -> int | None:
    """Of `num_open` positions, those that the decision after `step` others in the block leaves
    open, of at most `steps` in it; None where that depends on what is decided."""
    if knobs.edit_threshold is not None:
        return None
    count = RULES[knobs.remasking].count
    if count is Count.SCHEDULE:
        return num_open - -(-num_open // max(1, steps - step))
    if count is Count.DREAM_SCHEDULE:
        return num_open - _dream_quota(num_open, step, steps)
    takes_one = count in (Count.THRESHOLD, Count.PREFIX) and knobs.threshold > 1
    return max(0, num_open - 1) if takes_one else None


def _dream_quota(num_open: int, step: int, steps: int) -> int:
    """`unmask.dream_quota` of `unmask.dream_rate`, operation by operation."""
    if step >= steps - 1:
        return num_open
    pace = (1 - DREAM_EPS) / steps
    return floor(num_open * (pace / (1 - pace * step)))

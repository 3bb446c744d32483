"""T2T editing (LLaDA2.1): tokens that were revealed are replaced where another one is surer, until
nothing changes. Plain functions of masks and probabilities; they know no rows, rules or requests.

Shape legend: N decided positions of all spans, R spans.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """What a step found and revealed, [N] each."""

    span_of: torch.Tensor
    """int64: the position's span."""
    is_open: torch.Tensor
    """bool: it is not final."""
    is_masked: torch.Tensor
    """bool: it is open and holds no token."""
    take: torch.Tensor
    """bool: it is masked, and the rule reveals it."""
    differs: torch.Tensor
    """bool: the token chosen is not the one it holds."""
    probs: torch.Tensor
    """Probability of the token chosen."""


class Edited(NamedTuple):
    """What the step does."""

    changed: torch.Tensor
    """[N] bool: positions that take the token chosen."""
    final: torch.Tensor
    """[N] bool: open positions that become final."""
    num_post_R: torch.Tensor
    """[R] int64: steps of the block that began without a mask, this one included."""


def edit(
    seen: Edit, least_R: torch.Tensor, *, num_post_R: torch.Tensor, max_post_R: torch.Tensor
) -> Edited:
    """A span edits where `least` is finite: tokens that it holds give way to others whose
    probability exceeds it, and nothing of its block is final before the block is done.

    Done is a block without masks when a step changed nothing, or after `max_post` steps that began
    without one. `num_post` are those before this step. Other spans keep what they reveal.
    """
    span_of, num_spans = seen.span_of, len(least_R)
    replaced = seen.is_open & ~seen.is_masked & seen.differs & (seen.probs > least_R[span_of])
    changed = seen.take | replaced

    def has(flags: torch.Tensor) -> torch.Tensor:
        counts = torch.zeros(num_spans, dtype=torch.int64, device=flags.device)
        return counts.index_add_(0, span_of, flags.long()) > 0

    num_post = torch.where(has(seen.is_masked), 0, num_post_R + 1)
    is_done = ~has(seen.is_masked & ~seen.take) & (~has(changed) | (num_post >= max_post_R))
    edits = least_R < torch.inf
    final = torch.where(edits[span_of], seen.is_open & is_done[span_of], seen.take)
    return Edited(changed, final, num_post)

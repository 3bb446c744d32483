"""Which masked positions of a block become final in a step: plain functions of confidences.

They do not know tokens, rows or requests. Shape legend: R rows, B positions of a block.
`masked_RB` says which positions may be revealed; where it is False, `confidence_RB` is not read.
Of equal confidences the lowest position goes first.
"""

from __future__ import annotations

import torch

REMASKING = ("threshold", "low_confidence_static", "low_confidence_dynamic", "sequential")
"""Names of the rules; a rule's number is its place here."""


def quota(num_masks: torch.Tensor, steps: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """[R] positions that a fixed schedule reveals in step `step`, counted from 0.

    M // S + [step < M % S] (LLaDA's generate), and at least one.
    """
    share = num_masks // steps + (step < num_masks % steps).long()
    return share.clamp(min=1)


def most_confident(
    confidence_RB: torch.Tensor, masked_RB: torch.Tensor, count_R: torch.Tensor
) -> torch.Tensor:
    """[R, B] the `count` most confident masked positions (SDAR's low_confidence_static)."""
    ranked = confidence_RB.masked_fill(~masked_RB, -torch.inf)
    places = ranked.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    return (places < count_R[:, None]) & masked_RB


def above_threshold(
    confidence_RB: torch.Tensor, masked_RB: torch.Tensor, threshold_R: torch.Tensor
) -> torch.Tensor:
    """[R, B] masked positions with confidence >= threshold, and always the best (Fast-dLLM)."""
    one = torch.ones_like(threshold_R, dtype=torch.int64)
    best = most_confident(confidence_RB, masked_RB, one)
    return (masked_RB & (confidence_RB >= threshold_R[:, None])) | best


def dynamic(
    confidence_RB: torch.Tensor,
    masked_RB: torch.Tensor,
    threshold_R: torch.Tensor,
    count_R: torch.Tensor,
) -> torch.Tensor:
    """[R, B] all above the threshold if these are at least `count`, else the `count` best (SDAR's
    low_confidence_dynamic)."""
    above = masked_RB & (confidence_RB > threshold_R[:, None])
    enough = above.sum(dim=1) >= count_R
    return torch.where(enough[:, None], above, most_confident(confidence_RB, masked_RB, count_R))


def leftmost(masked_RB: torch.Tensor, count_R: torch.Tensor) -> torch.Tensor:
    """[R, B] the first `count` masked positions (SDAR's sequential)."""
    return masked_RB & (masked_RB.cumsum(dim=1) <= count_R[:, None])


def reveal(
    rule_R: torch.Tensor,
    confidence_RB: torch.Tensor,
    masked_RB: torch.Tensor,
    threshold_R: torch.Tensor,
    count_R: torch.Tensor,
) -> torch.Tensor:
    """[R, B] what each row's own rule (its number in REMASKING) reveals.

    All rules are evaluated for all rows: a block is a few dozen positions, a branch is a wait.
    """
    by_rule = torch.stack(
        (
            above_threshold(confidence_RB, masked_RB, threshold_R),
            most_confident(confidence_RB, masked_RB, count_R),
            dynamic(confidence_RB, masked_RB, threshold_R, count_R),
            leftmost(masked_RB, count_R),
        )
    )
    return by_rule[rule_R, torch.arange(len(rule_R), device=rule_R.device)]

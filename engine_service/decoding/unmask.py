"""How many masked positions of a block become final in a step: plain functions of measures.

They do not know tokens, rows, requests or the names of rules. Shape legend: R rows, B positions of
a block. `masked_RB` says which positions are open; where it is False, no measure is read. Positions
are ranked by some measure, and of equal ones the lowest position goes first.
"""

from __future__ import annotations

import torch

DREAM_EPS = 1e-3
"""Where Dream's time ends; it starts at 1 (eps of its generation config)."""


def quota(num_masks_R: torch.Tensor, steps_R: torch.Tensor, step_R: torch.Tensor) -> torch.Tensor:
    """[R] positions that a block of M masks reveals in step s, counted from 0, of S.

    M // S + [s < M % S] (LLaDA's generate), and at least one. S need not divide M.
    """
    share = num_masks_R // steps_R + (step_R < num_masks_R % steps_R).long()
    return share.clamp(min=1)


def remaining_quota(
    num_open_R: torch.Tensor, steps_R: torch.Tensor, step_R: torch.Tensor
) -> torch.Tensor:
    """[R] the same share from what is left: ceil(open / (S - s)), everything from step S - 1 on.

    Equals `quota` where every step before revealed its share, whatever the block started with.
    """
    left = (steps_R - step_R).clamp(min=1)
    return (num_open_R + left - 1) // left


def dream_rate(steps_R: torch.Tensor, step_R: torch.Tensor) -> torch.Tensor:
    """[R] float64 1 - t_next / t: the part of the masks that falls in step s, 1 in the last one.

    t runs through linspace(1, eps, S + 1) (Dream, arXiv 2508.15487).
    """
    pace = (1 - DREAM_EPS) / steps_R.double()
    rate = pace / (1 - pace * step_R)
    return torch.where(step_R >= steps_R - 1, 1.0, rate)


def dream_quota(num_open_R: torch.Tensor, rate_R: torch.Tensor) -> torch.Tensor:
    """[R] floor(open * rate), which may be 0: the last step reveals whatever is left (Dream)."""
    return (num_open_R * rate_R).floor().long()


def count_at_least(
    measure_RB: torch.Tensor, masked_RB: torch.Tensor, least_R: torch.Tensor
) -> torch.Tensor:
    """[R] masked positions with measure >= least."""
    return (masked_RB & (measure_RB >= least_R[:, None])).sum(dim=1)


def count_by_factor(
    ranked_RB: torch.Tensor, num_open_R: torch.Tensor, factor_R: torch.Tensor
) -> torch.Tensor:
    """[R] the largest n with c_(n) >= 1 - f / (n + 1), at least one (Fast-dLLM's factor, arXiv
    2505.22618). `ranked_RB`: confidences of the open positions in descending order.

    The left side falls with n and the right side rises: as many as hold are the first ones.
    """
    n = torch.arange(1, ranked_RB.shape[1] + 1, device=ranked_RB.device)
    least = 1 - factor_R[:, None] / (n + 1)
    return ((n <= num_open_R[:, None]) & (ranked_RB >= least)).sum(dim=1).clamp(min=1)


def count_by_entropy(
    ranked_RB: torch.Tensor, num_open_R: torch.Tensor, bound_R: torch.Tensor
) -> torch.Tensor:
    """[R] positions before which the entropies sum to at most the bound (EB-sampler, arXiv
    2505.24857). `ranked_RB`: entropies of the open positions in ascending order."""
    n = torch.arange(ranked_RB.shape[1], device=ranked_RB.device)
    before = torch.nn.functional.pad(ranked_RB[:, :-1], (1, 0)).cumsum(dim=1)
    return ((n < num_open_R[:, None]) & (before <= bound_R[:, None])).sum(dim=1)


def count_leading(
    confidence_RB: torch.Tensor, masked_RB: torch.Tensor, threshold_R: torch.Tensor
) -> torch.Tensor:
    """[R] masked positions, from the left, up to the first with confidence < threshold."""
    fails = masked_RB & (confidence_RB < threshold_R[:, None])
    return (masked_RB & (fails.cumsum(dim=1) == 0)).sum(dim=1)


def best_of_runs(confidence_RB: torch.Tensor, masked_RB: torch.Tensor) -> torch.Tensor:
    """[R, B] bool: the most confident position of every run of adjacent masked positions."""
    num_rows, block = masked_RB.shape
    place = torch.arange(block, device=masked_RB.device).expand(num_rows, -1)
    starts = masked_RB & ~torch.nn.functional.pad(masked_RB[:, :-1], (1, 0))
    run = starts.cumsum(dim=1)
    best = confidence_RB.new_full((num_rows, block + 1), -torch.inf)
    shown = confidence_RB.masked_fill(~masked_RB, -torch.inf)
    best.scatter_reduce_(1, run, shown, "amax")
    is_best = masked_RB & (shown == best.gather(1, run))
    first = place.new_full((num_rows, block + 1), block)
    first.scatter_reduce_(1, run, place.masked_fill(~is_best, block), "amin")
    return is_best & (place == first.gather(1, run))

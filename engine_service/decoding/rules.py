"""The unmask rules by name: each is an order of the masked positions and a number to take of them.

All rows of a step go through the same few operations, whatever their rules: a block is a few dozen
positions, and on CUDA a branch is a wait. It does not know tokens, requests or where the numbers of
a row are kept.
Shape legend: R rows, B positions of a block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

import torch

from engine_service.decoding.unmask import (
    best_of_runs,
    count_at_least,
    count_by_entropy,
    count_by_factor,
    count_leading,
    dream_quota,
    dream_rate,
    quota,
    remaining_quota,
)


class Order(IntEnum):
    """What masked positions are ranked by; the largest goes first, of equals the lowest place."""

    CONFIDENCE = 0
    MARGIN = 1
    NEGATIVE_ENTROPY = 2
    UNIFORM = 3
    FROM_THE_LEFT = 4
    SPLITTING = 5
    """The confident ones and the best of every run, by confidence; then all others."""


class Count(IntEnum):
    """How many of them fall."""

    SCHEDULE = 0
    DYNAMIC = 1
    DREAM_SCHEDULE = 2
    COINS = 3
    THRESHOLD = 4
    AT_MOST = 5
    FACTOR = 6
    ENTROPY_BOUND = 7
    PREFIX = 8
    SPLITTING = 9


@dataclass(frozen=True, slots=True)
class Rule:
    """`reads` are the knobs that the rule looks at; others may not be given with it."""

    order: Order
    count: Count
    reads: tuple[str, ...]


RULES = {
    "threshold": Rule(Order.CONFIDENCE, Count.THRESHOLD, ("threshold",)),
    "factor": Rule(Order.CONFIDENCE, Count.FACTOR, ("factor",)),
    "entropy_bound": Rule(Order.NEGATIVE_ENTROPY, Count.ENTROPY_BOUND, ("entropy_bound",)),
    "low_confidence": Rule(Order.CONFIDENCE, Count.SCHEDULE, ("steps",)),
    "low_confidence_static": Rule(Order.CONFIDENCE, Count.SCHEDULE, ("steps",)),
    "low_confidence_dynamic": Rule(Order.CONFIDENCE, Count.DYNAMIC, ("threshold", "steps")),
    "sequential": Rule(Order.FROM_THE_LEFT, Count.SCHEDULE, ("steps",)),
    "random": Rule(Order.UNIFORM, Count.SCHEDULE, ("steps",)),
    "maskgit_plus": Rule(Order.CONFIDENCE, Count.DREAM_SCHEDULE, ("steps", "alg_temp")),
    "topk_margin": Rule(Order.MARGIN, Count.DREAM_SCHEDULE, ("steps", "alg_temp")),
    "entropy": Rule(Order.NEGATIVE_ENTROPY, Count.DREAM_SCHEDULE, ("steps", "alg_temp")),
    "origin": Rule(Order.UNIFORM, Count.COINS, ("steps",)),
    "adaptive": Rule(Order.CONFIDENCE, Count.AT_MOST, ("max_parallel", "start_threshold")),
    "prefix": Rule(Order.FROM_THE_LEFT, Count.PREFIX, ("threshold",)),
    "hierarchical": Rule(Order.SPLITTING, Count.SPLITTING, ("threshold", "low_threshold")),
}
"""By the names that a request's `remasking` may have: the authors' own, where they gave one.

threshold and factor are Fast-dLLM's, entropy_bound the EB-sampler's, low_confidence and random
LLaDA's, low_confidence_static, low_confidence_dynamic and sequential SDAR's, hierarchical dInfer's
(both of its comparisons are strict). maskgit_plus, topk_margin, entropy and origin are Dream's and
follow its schedule, which may reveal nothing in a step; all others reveal at least one position.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What a step says of the positions [R, B]; read where `masked_RB` only."""

    masked_RB: torch.Tensor
    confidence_RB: torch.Tensor
    """Probability of the chosen token."""
    margin_RB: torch.Tensor
    """Probability of the likeliest token minus that of the second."""
    negative_entropy_RB: torch.Tensor
    """sum p ln p."""
    uniform_RB: torch.Tensor
    """Random numbers in (0, 1)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Each row's rule and numbers, [R] each; int64, the last five float64."""

    order_R: torch.Tensor
    count_R: torch.Tensor
    num_masks_R: torch.Tensor
    """Masks of a whole block."""
    steps_R: torch.Tensor
    step_R: torch.Tensor
    """Decisions taken in the block."""
    max_parallel_R: torch.Tensor
    threshold_R: torch.Tensor
    low_threshold_R: torch.Tensor
    factor_R: torch.Tensor
    entropy_bound_R: torch.Tensor
    alg_temp_R: torch.Tensor
    """Above 0 positions are drawn by softmax(measure / alg_temp) without replacement."""


def present(codes_R: torch.Tensor, kinds: type[IntEnum]) -> set[int]:
    """The kinds that some row has; on CUDA all of them, since looking would wait for the device and
    a captured graph has to serve every row."""
    return set(codes_R.tolist()) if codes_R.device.type == "cpu" else set(map(int, kinds))


def reveal(seen: Evidence, terms: Terms) -> torch.Tensor:
    """[R, B] bool: the masked positions that each row's own rule makes final."""
    masked = seen.masked_RB
    num_rows, block = masked.shape
    row = torch.arange(num_rows, device=masked.device)
    place = torch.arange(block, device=masked.device).expand(num_rows, -1)
    score = _scores(seen, terms, place)[terms.order_R, row]
    score = _tempered(score, seen, terms.alg_temp_R).masked_fill(~masked, -torch.inf)
    ranked = score.argsort(dim=1, descending=True, stable=True)
    count = _counts(seen, terms, ranked)[terms.count_R, row]
    rank = torch.empty_like(ranked).scatter_(1, ranked, place)
    return masked & (rank < count[:, None])


def _tempered(score_RB: torch.Tensor, seen: Evidence, alg_temp_R: torch.Tensor) -> torch.Tensor:
    """Scores whose order is a draw where the temperature is above 0: Gumbel-top-k (Kool et al.
    2019, arXiv 1903.06059)."""
    warm = alg_temp_R[:, None] > 0
    noise = -(-seen.uniform_RB.log()).log()
    return torch.where(warm, score_RB / torch.where(warm, alg_temp_R[:, None], 1) + noise, score_RB)


def _splits(seen: Evidence, terms: Terms) -> torch.Tensor:
    """[R, B] bool: what dInfer's hierarchical decoding takes."""
    above = seen.confidence_RB > terms.threshold_R[:, None]
    above_low = seen.confidence_RB > terms.low_threshold_R[:, None]
    best = best_of_runs(seen.confidence_RB, seen.masked_RB)
    return seen.masked_RB & (above | (best & above_low))


def _scores(seen: Evidence, terms: Terms, place_RB: torch.Tensor) -> torch.Tensor:
    """[Order, R, B] what each order ranks by; anything in orders that no row has."""
    confidence = seen.confidence_RB
    by_order: dict[Order, Callable[[], torch.Tensor]] = {
        Order.CONFIDENCE: lambda: confidence,
        Order.MARGIN: lambda: seen.margin_RB,
        Order.NEGATIVE_ENTROPY: lambda: seen.negative_entropy_RB,
        Order.UNIFORM: lambda: seen.uniform_RB,
        Order.FROM_THE_LEFT: lambda: -place_RB.to(confidence.dtype),
        # A probability is at most 1.
        Order.SPLITTING: lambda: confidence + 2 * _splits(seen, terms),
    }
    found = present(terms.order_R, Order)
    return torch.stack([by_order[kind]() if kind in found else confidence for kind in Order])


def _counts(seen: Evidence, terms: Terms, ranked_RB: torch.Tensor) -> torch.Tensor:
    """[Count, R] how many positions each way of counting takes; anything for those no row has."""
    masked, confidence, threshold = seen.masked_RB, seen.confidence_RB, terms.threshold_R
    steps, step = terms.steps_R, terms.step_R
    num_open = masked.sum(dim=1)

    def at_least() -> torch.Tensor:
        return count_at_least(confidence, masked, threshold).clamp(min=1)

    def dynamic() -> torch.Tensor:
        above = (masked & (confidence > threshold[:, None])).sum(dim=1)
        return torch.maximum(above, quota(terms.num_masks_R, steps, step))

    def by_entropy() -> torch.Tensor:
        entropy = -seen.negative_entropy_RB.gather(1, ranked_RB)
        return count_by_entropy(entropy, num_open, terms.entropy_bound_R)

    by_count: dict[Count, Callable[[], torch.Tensor]] = {
        Count.SCHEDULE: lambda: remaining_quota(num_open, steps, step),
        Count.DYNAMIC: dynamic,
        Count.DREAM_SCHEDULE: lambda: dream_quota(num_open, dream_rate(steps, step)),
        Count.COINS: lambda: count_at_least(seen.uniform_RB, masked, 1 - dream_rate(steps, step)),
        Count.THRESHOLD: at_least,
        Count.AT_MOST: lambda: torch.minimum(at_least(), terms.max_parallel_R),
        Count.FACTOR: lambda: count_by_factor(
            confidence.gather(1, ranked_RB), num_open, terms.factor_R
        ),
        Count.ENTROPY_BOUND: by_entropy,
        Count.PREFIX: lambda: count_leading(confidence, masked, threshold).clamp(min=1),
        Count.SPLITTING: lambda: _splits(seen, terms).sum(dim=1).clamp(min=1),
    }
    found = present(terms.count_R, Count)
    return torch.stack([by_count[kind]() if kind in found else num_open for kind in Count])

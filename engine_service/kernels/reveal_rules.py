"""The unmask rules of one block as device functions: how masked positions rank, and how many fall.

Device halves of decoding/rules.py and decoding/unmask.py, which say what they mean. They launch
nothing and know neither tokens nor rows. Shape legend: B positions of a block.
"""

from __future__ import annotations

from typing import NamedTuple

from engine_service.kernels.jit import jit, tl


class Codes(NamedTuple):
    """The numbers that orders and counts of the rules have (decoding/rules.py), and the purpose of
    their random numbers (sampling/rng.py)."""

    margin: int
    negative_entropy: int
    uniform: int
    from_the_left: int
    order_splitting: int
    dynamic: int
    dream_schedule: int
    coins: int
    threshold: int
    at_most: int
    factor: int
    entropy_bound: int
    prefix: int
    count_splitting: int
    remask: int


class Seen(NamedTuple):
    """On the device: rules.Evidence of one span, [B] each."""

    masked: tl.tensor
    confidence: tl.tensor
    margin: tl.tensor
    negative_entropy: tl.tensor
    uniform: tl.tensor


class Terms(NamedTuple):
    """On the device: rules.Terms of one span; those behind `max_parallel` are float64."""

    order: tl.tensor
    count: tl.tensor
    num_masks: tl.tensor
    steps: tl.tensor
    taken: tl.tensor
    max_parallel: tl.tensor
    threshold: tl.tensor
    low_threshold: tl.tensor
    factor: tl.tensor
    bound: tl.tensor
    alg_temp: tl.tensor


@jit
def total(flags: tl.tensor) -> tl.tensor:
    """int64: how many are set."""
    return tl.sum(flags.to(tl.int64), 0)


@jit
def _ahead(value: tl.tensor, B: tl.constexpr) -> tl.tensor:
    """[B, B]: whether the second one comes before the first; of equals the lowest place does."""
    place = tl.arange(0, B)
    above = value[None, :] > value[:, None]
    equal = value[None, :] == value[:, None]
    return above | (equal & (place[None, :] < place[:, None]))


@jit
def ranks_of(score: tl.tensor, B: tl.constexpr) -> tl.tensor:
    """[B] int64: how many come before each."""
    return tl.sum(_ahead(score, B).to(tl.int64), 1)


@jit
def _splits(seen: Seen, terms: Terms, B: tl.constexpr) -> tl.tensor:
    """rules._splits. Two places are of one run if nothing between them is unmasked."""
    masked, confidence = seen.masked, seen.confidence.to(tl.float64)
    run = tl.cumsum(tl.where(masked, 0, 1), 0)
    same = (run[None, :] == run[:, None]) & masked[None, :]
    best = tl.sum((same & _ahead(confidence, B)).to(tl.int32), 1) == 0
    return masked & ((confidence > terms.threshold) | (best & (confidence > terms.low_threshold)))


@jit
def _dream_rate(terms: Terms) -> tl.tensor:
    """unmask.dream_rate."""
    one = tl.full([], 1.0, tl.float64)
    pace = tl.full([], 0.999, tl.float64) / terms.steps.to(tl.float64)
    rate = pace / (one - pace * terms.taken.to(tl.float64))
    return tl.where(terms.taken >= terms.steps - 1, one, rate)


@jit
def _quota(terms: Terms) -> tl.tensor:
    """unmask.quota."""
    more = (terms.taken < terms.num_masks % terms.steps).to(tl.int64)
    return tl.maximum(terms.num_masks // terms.steps + more, 1)


@jit
def count_falling(
    seen: Seen, terms: Terms, rank: tl.tensor, C: tl.constexpr, B: tl.constexpr
) -> tl.tensor:
    """int64: how many fall, by the span's own way of counting (rules._counts)."""
    masked, kind, threshold = seen.masked, terms.count, terms.threshold
    num_open, confidence = total(masked), seen.confidence.to(tl.float64)
    # By a schedule: unmask.remaining_quota.
    left = tl.maximum(terms.steps - terms.taken, 1)
    count = (num_open + left - 1) // left
    at_least = tl.maximum(total(masked & (confidence >= threshold)), 1)
    count = tl.where(kind == C.threshold, at_least, count)
    count = tl.where(kind == C.at_most, tl.minimum(at_least, terms.max_parallel), count)
    if kind == C.dynamic:
        count = tl.maximum(total(masked & (confidence > threshold)), _quota(terms))
    if kind == C.dream_schedule:
        count = tl.floor(num_open.to(tl.float64) * _dream_rate(terms)).to(tl.int64)
    if kind == C.coins:
        least = tl.full([], 1.0, tl.float64) - _dream_rate(terms)
        count = total(masked & (seen.uniform.to(tl.float64) >= least))
    if kind == C.factor:
        least = tl.full([], 1.0, tl.float64) - terms.factor / (rank + 2).to(tl.float64)
        count = tl.maximum(total(masked & (confidence >= least)), 1)
    if kind == C.entropy_bound:
        entropy = tl.where(masked, -seen.negative_entropy.to(tl.float64), 0.0)
        earlier = rank[None, :] < rank[:, None]
        before = tl.sum(tl.where(earlier, entropy[None, :], 0.0), 1)
        count = total(masked & (before <= terms.bound))
    if kind == C.prefix:
        fails = masked & (confidence < threshold)
        count = tl.maximum(total(masked & (tl.cumsum(fails.to(tl.int32), 0) == 0)), 1)
    if kind == C.count_splitting:
        count = tl.maximum(total(_splits(seen, terms, B)), 1)
    return count


@jit
def score_of(seen: Seen, terms: Terms, C: tl.constexpr, B: tl.constexpr) -> tl.tensor:
    """[B] float64 that masked positions are ranked by (rules._scores, rules._tempered)."""
    order, score = terms.order, seen.confidence
    score = tl.where(order == C.margin, seen.margin, score)
    score = tl.where(order == C.negative_entropy, seen.negative_entropy, score)
    score = tl.where(order == C.uniform, seen.uniform, score)
    score = tl.where(order == C.from_the_left, -tl.arange(0, B).to(tl.float32), score)
    if order == C.order_splitting:
        # In float32 as there: a sum that rounds makes equals.
        score = seen.confidence + 2.0 * _splits(seen, terms, B).to(tl.float32)
    wide = score.to(tl.float64)
    if terms.alg_temp > 0:
        noise = -tl.log(-tl.log(seen.uniform))
        wide = wide / terms.alg_temp + noise.to(tl.float64)
    return tl.where(seen.masked, wide, float("-inf"))


@jit
def adapt(threshold: tl.tensor, num_taken: tl.tensor, num_open: tl.tensor) -> tl.tensor:
    """float64: the adaptive rule's threshold in the next step (decoding/settle.adapt)."""
    share = num_taken.to(tl.float64) / tl.maximum(num_open, 1).to(tl.float64)
    many = (share > tl.full([], 0.7, tl.float64)).to(tl.float64)
    few = (share < tl.full([], 0.3, tl.float64)).to(tl.float64)
    moved = threshold + tl.full([], 0.05, tl.float64) * (many - few)
    moved = tl.maximum(moved, tl.full([], 0.1, tl.float64))
    return tl.minimum(moved, tl.full([], 0.9, tl.float64))

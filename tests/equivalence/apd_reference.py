"""Adaptive parallel decoding with a verifier, written down from the paper's Algorithm 1 (arXiv
2506.00413): one row, one position after the other, plain lists. Only the noise is the engine's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from engine_service.sampling.rng import Purpose, draw_keys, gumbel, request_seed

Logits = list[float]
NEVER = -math.inf


@dataclass(frozen=True, kw_only=True)
class Knobs:
    """What one row asks for. `weight` is the paper's R."""

    weight: float
    temperature: float
    seed: int
    banned: tuple[int, ...] = ()
    bias: dict[int, float] = field(default_factory=dict)
    top_k: int = 0


def noise_at(knobs: Knobs, position: int, draw: int, vocab: int) -> Logits:
    """The Gumbel numbers of one position in one step, one per id."""
    seed = torch.tensor([request_seed(knobs.seed, 0)])
    key = draw_keys(seed, Purpose.TOKEN, torch.tensor([position]), torch.tensor([draw]))
    return [float(value) for value in gumbel(key, torch.arange(vocab), torch.float64)[0]]


def sample(logits: Logits, noise: Logits, knobs: Knobs) -> int:
    """sample_gumbel: the argmax of logits / temperature + noise; the argmax at temperature 0."""
    scores = [
        NEVER if token in knobs.banned else value + knobs.bias.get(token, 0.0)
        for token, value in enumerate(logits)
    ]
    order = sorted(range(len(scores)), key=lambda token: (-scores[token], token))
    if knobs.temperature == 0:
        return order[0]
    kept = order[: knobs.top_k or None]
    return max(kept, key=lambda token: scores[token] / knobs.temperature + noise[token])


def product(marginal: Logits, causal: Logits, weight: float) -> Logits:
    """Logits of p_D^R p_AR^(1 - R), where p^0 is 1 for p = 0 too."""
    if weight in (0, 1):
        return marginal if weight else causal
    return [weight * a + (1 - weight) * b for a, b in zip(marginal, causal, strict=True)]


def num_accepted(
    drafted: Sequence[int],
    marginals: Sequence[Logits],
    causals: Iterable[Logits],
    noises: Sequence[Logits],
    knobs: Knobs,
) -> int:
    """How many drafted tokens are kept, from the left; the first one always is. `causals` is read
    no further than that takes."""
    kept = 0
    for token, marginal, causal, noise in zip(drafted, marginals, causals, noises, strict=True):
        target = sample(product(marginal, causal, knobs.weight), noise, knobs)
        if kept and token != target:
            break
        kept += 1
    return kept


def decode(
    marginals_of: Callable[[list[int | None]], list[Logits]],
    next_logits: Callable[[list[int]], Logits],
    row: list[int | None],
    lookahead: int,
    knobs: Knobs,
) -> tuple[list[int], list[int]]:
    """Fills the None of `row`; also how many tokens every step kept.

    A step sees the row up to `lookahead` positions from its first None. `marginals_of` gives the
    diffusion model's logits of every position of that, `next_logits` the causal model's behind a
    prefix: a call for every position that is looked at.
    """
    counts: list[int] = []
    while None in row:
        start = row.index(None)
        seen = row[: start + lookahead]
        marginals = marginals_of(seen)
        places = [place for place, token in enumerate(seen) if token is None]
        noises = [noise_at(knobs, p, len(counts), len(marginals[p])) for p in places]
        own = [marginals[p] for p in places]
        drafted = [sample(each, noise, knobs) for each, noise in zip(own, noises, strict=True)]
        read = list(seen)
        for place, token in zip(places, drafted, strict=True):
            read[place] = token
        causals = (next_logits([t for t in read[:place] if t is not None]) for place in places)
        kept = num_accepted(drafted, own, causals, noises, knobs)
        for place, token in zip(places[:kept], drafted, strict=False):
            row[place] = token
        counts.append(kept)
    return [token for token in row if token is not None], counts

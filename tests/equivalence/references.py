"""Slow, cache-free decoding written down from the definitions, to hold against the engine."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import torch

from engine_service.sampling.rng import Purpose, draw_keys, request_seed, uniform
from tests.equivalence.rule_reference import READS, Shown, slow_adapt, slow_rule
from tests.fakes import MASK, VOCAB, ToyModel

RULES = tuple(READS)
"""Every rule; those of DRAWING depend on a request's seed at temperature 0 too."""
DRAWING = ("random", "origin")
GREEDY_RULES = tuple(rule for rule in RULES if rule not in DRAWING)


def reference_ar(model: ToyModel, prompt: Sequence[int], count: int) -> list[int]:
    """Greedy next tokens, everything recomputed for each of them."""
    tokens = list(prompt)
    for _ in range(count):
        logits = model.dense(tokens, 1)[-1]
        logits[MASK] = -torch.inf
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


def reference_shift0(model: ToyModel, prompt: Sequence[int], count: int) -> list[int]:
    """Greedy tokens of a model that predicts position p at a mask standing at p."""
    tokens = list(prompt)
    for _ in range(count):
        logits = model.dense([*tokens, MASK], 1)[-1]
        logits[MASK] = -torch.inf
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


def reference_block(
    model: ToyModel,
    prompt: Sequence[int],
    count: int,
    block: int,
    knobs: dict[str, Any],
    *,
    seed: int = 0,
) -> list[int]:
    """Block diffusion with Python lists: every forward recomputes everything, no cache at all.

    `seed` serves the rules that draw.
    """
    tokens, whole = list(prompt), with_defaults(knobs, block)
    while len(tokens) - len(prompt) < count:
        start, end = len(tokens), (len(tokens) // block + 1) * block
        tokens += [MASK] * (end - start)
        hidden = list(range(start, end))
        step, adapted = 0, whole["start_threshold"]
        while hidden:
            logits = model.dense(tokens, block)
            logits[:, MASK] = -torch.inf
            best = [int(logits[p].argmax()) for p in hidden]
            shown = show(logits, hidden, best, seed, step)
            places = slow_rule(
                shown, num_masks=end - start, step=step, knobs=whole, adapted=adapted
            )
            for place in places:
                tokens[hidden[place]] = best[place]
            adapted = slow_adapt(adapted, len(places), len(hidden))
            hidden = [p for i, p in enumerate(hidden) if i not in places]
            step += 1
    return tokens[len(prompt) : len(prompt) + count]


def show(logits: torch.Tensor, hidden: list[int], best: list[int], seed: int, step: int) -> Shown:
    """What the rules see of open positions: softmaxes without temperature, a number per draw."""
    probs = [logits[p].softmax(-1) for p in hidden]
    top = [sorted(p.tolist(), reverse=True) for p in probs]
    return Shown(
        positions=hidden,
        confidence=[float(p[t]) for p, t in zip(probs, best, strict=True)],
        margin=[p[0] - p[1] for p in top],
        entropy=[-sum(q * math.log(q) for q in p if q > 0) for p in top],
        uniform=[_draw(seed, position, step) for position in hidden],
    )


def _draw(seed: int, position: int, step: int) -> float:
    place, draw = torch.tensor([position]), torch.tensor([step])
    key = draw_keys(torch.tensor([request_seed(seed, 0)]), Purpose.REMASK, place, draw)
    return float(uniform(key, torch.zeros(1, dtype=torch.int64), torch.float64))


def with_defaults(knobs: dict[str, Any], block: int) -> dict[str, Any]:
    """Knobs as a request means them."""
    whole = {
        "remasking": "threshold",
        "threshold": 0.9,
        "steps": block,
        "factor": 1.0,
        "entropy_bound": 0.1,
        "max_parallel": 8,
        "start_threshold": 0.3,
        "alg_temp": 0.0,
        **knobs,
    }
    whole["steps"] = int(whole["steps"])
    whole.setdefault("low_threshold", min(0.4, whole["threshold"]))
    return whole


def random_knobs(
    rng: random.Random, block: int, rules: Sequence[str] = GREEDY_RULES
) -> dict[str, Any]:
    """A rule and what it reads, with values for which none, some or all positions pass."""
    rule = rng.choice(rules)
    threshold = rng.choice([0.0, 0.3, 0.6, 0.9, 1.5])
    values = {
        "threshold": threshold,
        "steps": rng.randint(1, block),
        "factor": rng.choice([0.01, 0.5, 1.0, 2.0]),
        "entropy_bound": rng.choice([0.001, 0.5, 2.0, 50.0]),
        "max_parallel": rng.randint(1, block),
        "start_threshold": rng.choice([0.1, 0.3, 0.55, 0.9]),
        "alg_temp": 0.0 if rules is GREEDY_RULES else rng.choice([0.0, 0.2, 1.0]),
        "low_threshold": rng.choice([0.0, 0.2, threshold]) if threshold >= 0.2 else threshold,
    }
    return {"remasking": rule, **{name: values[name] for name in READS[rule]}}


def random_prompt(rng: random.Random, low: int, high: int) -> list[int]:
    """Tokens of the whole vocabulary: the mask token too is an ordinary one in a prompt."""
    return [rng.randrange(VOCAB) for _ in range(rng.randint(low, high))]

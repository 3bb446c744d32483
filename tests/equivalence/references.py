"""Slow, cache-free decoding written down from the definitions, to hold against the engine."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch

from engine_service.decoding.unmask import REMASKING
from tests.fakes import MASK, VOCAB, ToyModel


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
) -> list[int]:
    """Block diffusion with Python lists: every forward recomputes everything, no cache at all."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < count:
        end = (len(tokens) // block + 1) * block
        start = len(tokens)
        tokens += [MASK] * (end - start)
        hidden = list(range(start, end))
        num_masks = len(hidden)
        step = 0
        while hidden:
            logits = model.dense(tokens, block)
            logits[:, MASK] = -torch.inf
            best = [int(logits[p].argmax()) for p in hidden]
            confidence = [
                float(logits[p].softmax(-1)[t]) for p, t in zip(hidden, best, strict=True)
            ]
            for place in reference_rule(confidence, num_masks, step, block, knobs):
                tokens[hidden[place]] = best[place]
                hidden[place] = -1
            hidden = [p for p in hidden if p >= 0]
            step += 1
    return tokens[len(prompt) : len(prompt) + count]


def reference_rule(
    confidence: list[float], num_masks: int, step: int, block: int, knobs: dict[str, Any]
) -> list[int]:
    """Places to reveal, written down from the definition with sorted lists."""
    rule = knobs.get("remasking", "threshold")
    threshold, steps = knobs.get("threshold", 0.9), int(knobs.get("steps", block))
    quota = max(1, num_masks // steps + (1 if step < num_masks % steps else 0))
    by_confidence = sorted(range(len(confidence)), key=lambda i: (-confidence[i], i))
    if rule == "threshold":
        above = [i for i, c in enumerate(confidence) if c >= threshold]
        return above or by_confidence[:1]
    if rule == "low_confidence_static":
        return by_confidence[:quota]
    if rule == "sequential":
        return list(range(len(confidence)))[:quota]
    above = [i for i, c in enumerate(confidence) if c > threshold]
    return above if len(above) >= quota else by_confidence[:quota]


def random_knobs(rng: random.Random, block: int) -> dict[str, Any]:
    """Knobs for which none, some or all confidences pass."""
    return {
        "remasking": rng.choice(REMASKING),
        "threshold": rng.choice([0.0, 0.3, 0.6, 0.9, 1.5]),
        "steps": rng.randint(1, block),
    }


def random_prompt(rng: random.Random, low: int, high: int) -> list[int]:
    """Tokens of the whole vocabulary: the mask token too is an ordinary one in a prompt."""
    return [rng.randrange(VOCAB) for _ in range(rng.randint(low, high))]

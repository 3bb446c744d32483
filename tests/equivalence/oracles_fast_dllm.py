"""Fast-dLLM's loops (Wu et al. 2025, arXiv 2505.22618), written down again: decoding in parallel
by confidence, and keys and values that are kept although the tokens around them changed.

Greedy. One difference: the published cached loops run a forward that reveals nothing when the
full forward of a block revealed all of it; here that block is simply done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from tests.equivalence.oracles import (
    Cached,
    Canvas,
    Outcome,
    Past,
    most_likely,
    select,
    shares,
    shifted,
    surest,
)

Rule = Callable[[list[float], int, int], list[int]]
"""Confidences of the open places in order, masks when the block began, forwards since then:
indices of the places to reveal."""

CACHES = ("none", "prefix", "dual")


def threshold_rule(threshold: float) -> Rule:
    """All that reach the threshold, and always the best."""

    def rule(confidences: list[float], num_masks: int, step: int) -> list[int]:
        above = [index for index, sure in enumerate(confidences) if sure >= threshold]
        return above or surest(confidences, 1)

    return rule


def factor_rule(factor: float) -> Rule:
    """The most, n, whose n-th confidence c satisfies c >= 1 - factor / (n + 1), at least one.

    The published loop takes the last place too when it fails there; this is the definition.
    """

    def rule(confidences: list[float], num_masks: int, step: int) -> list[int]:
        ranked = surest(confidences, len(confidences))
        count = 1
        while count < len(ranked) and confidences[ranked[count]] >= 1 - factor / (count + 2):
            count += 1
        return ranked[:count]

    return rule


def schedule_rule(steps: int) -> Rule:
    """The masks of a block divided over `steps` forwards."""
    return lambda confidences, num_masks, step: surest(confidences, shares(num_masks, steps)[step])


def fast_dllm_generate(
    model: Cached,
    prompt: Sequence[int],
    *,
    mask_id: int,
    gen_length: int,
    block_length: int,
    rule: Rule,
    cache: str = "none",
    refresh_every: int | None = None,
    shift: int = 0,
) -> Outcome:
    """Token p is predicted by query p - `shift`; the published loop is that of LLaDA, shift 0.

    The first forward of a block computes everything. Those after it see what that one computed
    before the block (prefix) or on both sides of it (dual), and compute the rest anew, with the
    `shift` queries ahead of the block. `refresh_every` n computes everything again in every n-th
    forward of a block. The last block may be shorter (the authors refuse such a length).
    """
    canvas = Canvas(prompt, gen_length, mask_id)
    length = len(canvas)
    past: Past = []
    for start in range(len(prompt), length, block_length):
        stop, step = min(start + block_length, length), 0
        first = start - shift
        while places := canvas.open_in(start, stop):
            full = cache == "none" or step % (refresh_every or block_length + 1) == 0
            if full:
                logits, everything = _compute(model, canvas, range(length), [])
                past = select(everything, _kept(cache, first, stop, length))
            else:
                logits, _ = _compute(model, canvas, _fresh(cache, first, stop, length), past)
            query_of = [place - shift - (0 if full else first) for place in places]
            tokens, confidences = most_likely(logits[query_of], mask_id)
            taken = rule(confidences, stop - start, step)
            canvas.reveal({places[index]: tokens[index] for index in taken})
            step += 1
    return canvas.outcome(gen_length)


def fast_dllm_dream_generate(
    model: Cached,
    prompt: Sequence[int],
    *,
    mask_id: int,
    gen_length: int,
    block_length: int,
    threshold: float,
    cache: str,
) -> Outcome:
    """The published loop for Dream: the query of a block's first token lies outside of the block.

    So the full forward reveals that one token and nothing else; the forwards after it reveal the
    others by threshold.
    """
    assert gen_length % block_length == 0, f"{gen_length} tokens in blocks of {block_length}"
    canvas = Canvas(prompt, gen_length, mask_id)
    rule = threshold_rule(threshold)
    for start in range(len(prompt), len(canvas), block_length):
        stop = start + block_length
        logits, everything = _compute(model, canvas, range(len(canvas)), [])
        past = select(everything, _kept(cache, start, stop, len(canvas)))
        (first,), _ = most_likely(shifted(logits)[start : start + 1], mask_id)
        canvas.reveal({start: first})
        while places := canvas.open_in(start, stop):
            logits, _ = _compute(model, canvas, _fresh(cache, start, stop, len(canvas)), past)
            rows = shifted(logits)[[place - start for place in places]]
            tokens, confidences = most_likely(rows, mask_id)
            taken = rule(confidences, block_length, 0)
            canvas.reveal({places[index]: tokens[index] for index in taken})
    return canvas.outcome(gen_length)


def _kept(cache: str, start: int, stop: int, length: int) -> list[int]:
    """Positions whose keys and values are taken from the last full forward."""
    before, after = list(range(start)), list(range(stop, length))
    return {"none": [], "prefix": before, "dual": before + after}[cache]


def _fresh(cache: str, start: int, stop: int, length: int) -> range:
    """Positions that a forward between two full ones computes."""
    return range(start, length if cache == "prefix" else stop)


def _compute(
    model: Cached, canvas: Canvas, positions: range, past: Past
) -> tuple[torch.Tensor, Past]:
    """([Q, V] logits, own keys and values) of some positions of the canvas."""
    index = torch.tensor(positions)
    logits, own = model(canvas.token_ids[None, index], index, past)
    return logits[0], own

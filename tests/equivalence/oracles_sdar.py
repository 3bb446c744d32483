"""SDAR's block_diffusion_generate (Cheng et al. 2025, arXiv 2510.06303), written down again.

Greedy; confidence is the probability of the greedy token at temperature 1. Left out is where the
published loop goes wrong: more positions wanted than masks are left (it overwrites fixed tokens),
and entropy_bounded (it never computes an entropy).
"""

from __future__ import annotations

from collections.abc import Sequence

from tests.equivalence.oracles import Canvas, Logits, Outcome, most_likely, shares, surest

STRATEGIES = ("sequential", "low_confidence_static", "low_confidence_dynamic")


def sdar_generate(
    logits: Logits,
    prompt: Sequence[int],
    *,
    mask_id: int,
    gen_length: int,
    block_length: int,
    denoising_steps: int,
    strategy: str,
    threshold: float = 0.85,
) -> Outcome:
    """`logits` are block-causal with blocks of `block_length` aligned at position 0.

    The schedule divides a whole block, also where a prompt fills a part of it. Forwards that only
    store a finished block are not counted.
    """
    num_blocks = -(-(len(prompt) + gen_length) // block_length)
    end = num_blocks * block_length
    canvas = Canvas(prompt, end - len(prompt), mask_id)
    for start in range(len(prompt) // block_length * block_length, end, block_length):
        stop = start + block_length
        for count in shares(block_length, denoising_steps):
            places = canvas.open_in(start, stop)
            if not places:
                break
            rows = logits(canvas.token_ids[None, :stop])[0, places]
            tokens, confidences = most_likely(rows, mask_id)
            taken = _chosen(confidences, count, strategy, threshold)
            canvas.reveal({places[index]: tokens[index] for index in taken})
    return canvas.outcome(gen_length)


def _chosen(confidences: list[float], count: int, strategy: str, threshold: float) -> list[int]:
    if strategy == "sequential":
        return list(range(len(confidences)))[:count]
    if strategy == "low_confidence_dynamic":
        above = [index for index, sure in enumerate(confidences) if sure > threshold]
        if len(above) >= count:
            return above
    else:
        assert strategy == "low_confidence_static", strategy
    return surest(confidences, count)

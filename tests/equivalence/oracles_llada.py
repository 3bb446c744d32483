"""LLaDA's generate (Nie et al. 2025, arXiv 2502.09992, algorithms 4 and 5), written down again.

Greedy, low_confidence remasking.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tests.equivalence import oracles
from tests.equivalence.oracles import Canvas, Logits, Outcome, shares, surest


def llada_generate(
    logits: Logits,
    prompt: Sequence[int],
    *,
    mask_id: int,
    gen_length: int,
    block_length: int,
    steps: int,
    cfg_scale: float = 0.0,
    eos_id: int | None = None,
    eot_id: int | None = None,
    logits_eos_inf: bool = False,
    confidence_eos_eot_inf: bool = False,
) -> Outcome:
    """Blocks from left to right; `steps` are those of all blocks together.

    Confidence is the probability of the greedy token. With more steps than masks the last ones
    of a block reveal nothing, and still are forwards. With a `cfg_scale` a second forward sees
    masks instead of the prompt. The last two options are about `eos_id` and `eot_id`.
    """
    assert gen_length % block_length == 0, f"{gen_length} tokens in blocks of {block_length}"
    num_blocks = gen_length // block_length
    assert steps % num_blocks == 0, f"{steps} steps for {num_blocks} blocks"
    canvas = Canvas(prompt, gen_length, mask_id)
    for block in range(num_blocks):
        start = len(prompt) + block * block_length
        for count in shares(block_length, steps // num_blocks):
            places = canvas.open_in(start, start + block_length)
            rows = logits(canvas.token_ids[None])[0, places]
            if cfg_scale > 0:
                without = canvas.token_ids.clone()
                without[: len(prompt)] = mask_id
                unguided = logits(without[None])[0, places]
                rows = unguided + (cfg_scale + 1) * (rows - unguided)
            if logits_eos_inf:
                rows[:, eos_id] = -math.inf
            # At temperature 0 the authors' add_gumbel_noise returns its argument, so what they
            # write into one tensor is in the other too.
            noisy = rows
            tokens = oracles.distributions(noisy, mask_id).argmax(-1)
            if confidence_eos_eot_inf:
                noisy[:, eos_id] = rows[:, eot_id] = -math.inf
            probs = oracles.distributions(rows, mask_id)
            confidences = probs.gather(-1, tokens[:, None])[:, 0].tolist()
            taken = surest(confidences, count)
            canvas.reveal({places[index]: int(tokens[index]) for index in taken})
    return canvas.outcome(gen_length)

"""Dream's diffusion sampling (Ye et al. 2025, arXiv 2508.15487), written down again.

Greedy and with alg_temp 0; `origin` is left out, because which positions it reveals is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tests.equivalence.oracles import Canvas, Logits, Outcome, distributions, shifted, surest

ALGORITHMS = ("maskgit_plus", "topk_margin", "entropy")


def dream_sample(
    logits: Logits,
    prompt: Sequence[int],
    *,
    mask_id: int,
    gen_length: int,
    steps: int,
    alg: str,
    eps: float = 1e-3,
) -> Outcome:
    """The whole sequence is one block; `logits` are the model's own and are shifted here."""
    canvas = Canvas(prompt, gen_length, mask_id)
    for count in dream_counts(gen_length, steps, eps):
        places = canvas.open_in(0, len(canvas))
        rows = shifted(logits(canvas.token_ids[None])[0])[places]
        probs = distributions(rows, mask_id)
        tokens = probs.argmax(-1).tolist()
        taken = surest(confidence(probs, alg).tolist(), count)
        canvas.reveal({places[index]: tokens[index] for index in taken})
    return canvas.outcome(gen_length)


def confidence(probs_NV: torch.Tensor, alg: str) -> torch.Tensor:
    """[N] how sure the model is of each position; the authors add 1e-10 inside the logarithm."""
    if alg == "maskgit_plus":
        return probs_NV.amax(-1)
    if alg == "topk_margin":
        first, second = probs_NV.topk(2).values.unbind(-1)
        return first - second
    assert alg == "entropy", alg
    return (probs_NV * (probs_NV + 1e-10).log()).sum(-1)


def dream_counts(num_masks: int, steps: int, eps: float = 1e-3) -> list[int]:
    """How many of the masks each step reveals: floor(masks left * (1 - s / t)), then the rest.

    Times run linearly from 1 to `eps`; float32, as the authors compute them. Early steps may
    reveal nothing.
    """
    times = torch.linspace(1, eps, steps + 1)
    counts: list[int] = []
    for step in range(steps):
        left = num_masks - sum(counts)
        share = torch.tensor(left, dtype=torch.float32) * (1 - times[step + 1] / times[step])
        counts.append(left if step == steps - 1 else int(share))
    return counts

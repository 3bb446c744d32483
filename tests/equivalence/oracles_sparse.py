"""The sparse cache of dLLM-Serve and Sparse-dLLM, written down again, one request at a time.

The first `delay` forwards of a block compute everything and keep nothing. The one after them
computes everything too and keeps, per layer and key-value head, the positions outside of the block
that its queries attend to most. The others compute the block alone over what was kept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from tests.equivalence.oracles import Canvas, Outcome, Past, most_likely
from tests.equivalence.oracles_dense import DenseLLaDA
from tests.equivalence.oracles_fast_dllm import Rule


def sparse_generate(
    model: DenseLLaDA,
    prompt: Sequence[int],
    *,
    mask_id: int,
    gen_length: int,
    block_length: int,
    rule: Rule,
    ratio: float,
    delay: int,
    by_head: bool,
    pool: int,
    refresh_every: int | None = None,
) -> Outcome:
    """Greedy. `refresh_every` n chooses anew in every n-th forward after the first choice."""
    canvas = Canvas(prompt, gen_length, mask_id)
    length = len(canvas)
    kept: Past = []
    for start in range(len(prompt), length, block_length):
        stop, step = min(start + block_length, length), 0
        block = range(start, stop)
        while places := canvas.open_in(start, stop):
            since = step - delay
            if since <= 0 or (refresh_every and since % refresh_every == 0):
                queries: list[torch.Tensor] = []
                everything = torch.arange(length)
                logits, own = model.cached(canvas.token_ids[None], everything, [], queries)
                kept = [
                    keep(q[start:stop], *pair, block, ratio=ratio, by_head=by_head, pool=pool)
                    for q, pair in zip(queries, own, strict=True)
                ]
                first = 0
            else:
                index = torch.tensor(block)
                logits, _ = model.cached(canvas.token_ids[None, index], index, kept)
                first = start
            tokens, confidences = most_likely(logits[0][[p - first for p in places]], mask_id)
            taken = rule(confidences, stop - start, step)
            canvas.reveal({places[index]: tokens[index] for index in taken})
            step += 1
    return canvas.outcome(gen_length)


def keep(
    q_BHD: torch.Tensor,
    k_LGD: torch.Tensor,
    v_LGD: torch.Tensor,
    block: range,
    *,
    ratio: float,
    by_head: bool,
    pool: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [n, G, D] of the positions that a block attends to most; slot by slot the
    heads may stand for different positions."""
    outside = [p for p in range(len(k_LGD)) if p not in block]
    count = min(max(1, math.floor(len(outside) * ratio)), len(outside))
    num_heads, num_groups, size = q_BHD.shape[1], k_LGD.shape[1], q_BHD.shape[2]
    mean = q_BHD.mean(0)
    of_head = [
        (k_LGD[outside, h // (num_heads // num_groups)] @ mean[h] / size**0.5).tolist()
        for h in range(num_heads)
    ]
    keys, values = [], []
    for group in range(num_groups):
        own = range(group * (num_heads // num_groups), (group + 1) * (num_heads // num_groups))
        scores = [
            max(of_head[h][i] for h in own) if by_head else sum(row[i] for row in of_head)
            for i in range(len(outside))
        ]
        reach = pool // 2
        pooled = [max(scores[max(0, i - reach) : i + reach + 1]) for i in range(len(scores))]
        best = sorted(range(len(pooled)), key=lambda i: (-pooled[i], i))[:count]
        chosen = [outside[i] for i in best]
        keys.append(k_LGD[chosen, group])
        values.append(v_LGD[chosen, group])
    return torch.stack(keys, 1), torch.stack(values, 1)

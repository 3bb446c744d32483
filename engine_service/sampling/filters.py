"""Which tokens a row may draw from: top-k, top-p and min-p, in this order.

It does not know penalties, randomness or requests.
"""

from __future__ import annotations

import torch

from engine_service.sampling.batch import DecideBatch


def keep_likely(scores: torch.Tensor, batch: DecideBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Candidates of every row, best first: (scores, ids) [N, K]; dropped ones have score -inf.

    `scores` [N, V] are already divided by the temperature. Top-k keeps the k best (of equals the
    lowest ids); top-p then keeps the shortest prefix whose probability reaches p, at least one;
    min-p keeps what has at least min_p times the best probability. K is V, or the host's bound on
    top_k when every sampling row has one: the kept set does not depend on K.
    """
    tables, rows = batch.tables, batch.rows
    values, ids = _best(scores, batch.wants.max_top_k)
    top_k = tables.top_k[rows, None]
    places = torch.arange(values.shape[1], device=values.device)
    dropped = (places >= top_k) & (top_k > 0)
    # float64: a sum over K and one over V candidates then agree far below any gap of real logits.
    probs = values.masked_fill(dropped, float("-inf")).double().softmax(dim=1)
    dropped |= probs.cumsum(dim=1) - probs >= tables.top_p[rows, None]
    dropped |= probs < tables.min_p[rows, None] * probs[:, :1]
    dropped[:, 0] = False
    return values.masked_fill(dropped, float("-inf")), ids


def _best(scores: torch.Tensor, bound: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The `bound` best (None: all), best first, of equals the lowest id first."""
    size = scores.shape[1]
    if bound is None or bound >= size or scores.dtype != torch.float32:
        values, ids = scores.sort(dim=1, descending=True, stable=True)
        return values[:, :bound], ids[:, :bound]
    # topk leaves the order of equals open, so it ranks integers that hold the score's order in
    # the upper half and the id in the lower: unique, and equal on every device.
    bits = (scores + 0.0).view(torch.int32)  # + 0.0: minus zero equals zero
    bits ^= (bits >> 31).bitwise_and_(0x7FFFFFFF)
    keys = bits.long()
    keys <<= 32
    keys |= torch.arange(size - 1, -1, -1, device=scores.device)
    ids = size - 1 - (keys.topk(bound, dim=1).values & 0xFFFFFFFF)
    return scores.gather(1, ids), ids

"""Log-probabilities of given tokens and of the likeliest ones beside them.

It does not know rows or tables: logits and ids in, numbers out.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Scores(NamedTuple):
    """Column 0 is the given token, columns 1..k the likeliest ids, best first."""

    logprobs: torch.Tensor
    """[N, 1 + k] float32."""
    ids: torch.Tensor
    """[N, 1 + k] int64."""
    ranks: torch.Tensor
    """[N] int64: 1 + how many ids are strictly likelier than the given one."""


def score_tokens(logits_NV: torch.Tensor, token_ids: torch.Tensor, k: int) -> Scores:
    """log_softmax(logits) at `token_ids` [N] and at the k best ids; k is cut to V."""
    chosen = token_ids[:, None]
    chosen_logits = logits_NV.gather(1, chosen)
    best_logits, best_ids = logits_NV.topk(min(k, logits_NV.shape[1]), dim=1)
    raw = torch.cat((chosen_logits, best_logits), dim=1)
    return Scores(
        logprobs=(raw - logits_NV.logsumexp(dim=1, keepdim=True)).float(),
        ids=torch.cat((chosen, best_ids), dim=1),
        ranks=(logits_NV > chosen_logits).sum(dim=1) + 1,
    )

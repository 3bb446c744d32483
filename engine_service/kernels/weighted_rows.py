"""Weighted sums of scattered rows of a matrix, without copying the rows first.

It does not know what the rows are or where the weights come from.
"""

from __future__ import annotations

import torch
from torch.nn import functional


def weighted_rows_ref(
    rows_ND: torch.Tensor, index_BL: torch.Tensor, weights_BL: torch.Tensor
) -> torch.Tensor:
    """[B, D]: sum over l of weights[b, l] * rows[index[b, l]]."""
    return (rows_ND[index_BL] * weights_BL.unsqueeze(-1)).sum(dim=1)


def weighted_rows(
    rows_ND: torch.Tensor, index_BL: torch.Tensor, weights_BL: torch.Tensor
) -> torch.Tensor:
    """`weighted_rows_ref` in one pass over the rows, as a bag of embeddings."""
    return functional.embedding_bag(index_BL, rows_ND, mode="sum", per_sample_weights=weights_BL)

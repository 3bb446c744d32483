"""Token embedding and the output head, which may share one matrix."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from engine_service.kernels.embedding import gather_embeddings
from engine_service.kernels.small_linear import prefers_small, small_linear
from engine_service.layers.norm import RMSNorm


class Embedding(nn.Module):
    """One [V, E] matrix, read by row (`forward`) or as the output head (`logits`)."""

    def __init__(
        self, vocab_size: int, hidden_size: int, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        weight = torch.empty(vocab_size, hidden_size, device=device, dtype=dtype)
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, tokens: torch.Tensor, places_T: torch.Tensor) -> torch.Tensor:
        """[T, E] rows of the ids that stand at `places` [T] int64 of a flat int64 table."""
        return gather_embeddings(tokens, places_T, self.weight)

    def logits(self, hidden_NE: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
        """[N, E] to [N, V], of norm(hidden)."""
        if prefers_small(hidden_NE, self.weight):
            return small_linear(hidden_NE, self.weight, norm=(norm.weight, norm.eps))
        return functional.linear(norm(hidden_NE), self.weight)

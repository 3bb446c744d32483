"""Token embedding and the output head, which may share one matrix."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


class Embedding(nn.Module):
    """One [V, E] matrix, read by row (`forward`) or as the output head (`logits`)."""

    def __init__(
        self, vocab_size: int, hidden_size: int, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        weight = torch.empty(vocab_size, hidden_size, device=device, dtype=dtype)
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, input_ids_T: torch.Tensor) -> torch.Tensor:
        """[T] int64 to [T, E]."""
        return functional.embedding(input_ids_T, self.weight)

    def logits(self, hidden_NE: torch.Tensor) -> torch.Tensor:
        """[N, E] to [N, V]."""
        return functional.linear(hidden_NE, self.weight)

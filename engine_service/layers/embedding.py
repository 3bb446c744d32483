"""Token embedding and the output head, which may share one matrix.

Every rank holds the rows of some ids: others embed as zero there, and the ranks' sum has them all.
"""

from __future__ import annotations

import torch
from torch import nn

from engine_service.distributed import ALONE, Group
from engine_service.kernels.embedding import gather_embeddings
from engine_service.kernels.linear import linear
from engine_service.kernels.vocab_share import VocabShare
from engine_service.layers.norm import RMSNorm
from engine_service.layers.slots import Piece, Share, Slot


class Embedding(nn.Module):
    """One [V, E] matrix, read by row (`forward`) or as the output head (`logits`)."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
        group: Group = ALONE,
    ) -> None:
        super().__init__()
        self.ids, self._group = Share.rounded_up(vocab_size, group), group
        room = -(-vocab_size // group.size)
        weight = torch.empty(room, hidden_size, device=device, dtype=dtype)
        weight[self.ids.size :] = 0
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, tokens: torch.Tensor, places_T: torch.Tensor) -> torch.Tensor:
        """[T, E] rows of the ids that stand at `places` [T] int64 of a flat int64 table."""
        own = None if self.ids.is_whole else (self.ids.start, self.ids.size)
        return self._group.sum_(gather_embeddings(tokens, places_T, self.weight, own))

    def logits(self, hidden_NE: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
        """[N, E] to [N, V], of norm(hidden)."""
        return self._group.join(self.own_logits(hidden_NE, norm))[:, : self.ids.whole]

    def own_logits(self, hidden_NE: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
        """[N, room]: of the ids whose rows this rank holds."""
        return linear(hidden_NE, self.weight, norm=(norm.weight, norm.eps))

    @property
    def share(self) -> VocabShare | None:
        """The ids whose rows this rank holds; None: all."""
        if self._group.size == 1:
            return None
        return VocabShare(self.ids.start, self.ids.size, self._group.join)

    def slot(self) -> Slot:
        """The checkpoint's whole matrix, and what is held of it."""
        piece = Piece(self.weight[: self.ids.size], (self.ids.slice,))
        return Slot((self.ids.whole, self.weight.shape[1]), (piece,))

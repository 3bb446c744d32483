"""Confidence straight from hidden states: of the output head's logits one piece exists at a time.

The product is the library's, and a kernel goes over each piece while it lies in the cache. One
kernel for both would save the traffic of logits and must not lose more than that as a product.
Counted for an H200 (4.8 TB/s, 700 Tflop/s in products) and a head of 152,000 x 4,096 in bfloat16:
4,096 rows are 5.1 Tflop, 7.3 ms, beside which their logits, 1.2 GB once out and once in, are 0.5 ms
from memory and less from the cache; a product that reaches 93 % of the library's rate has lost it
already. 32 rows take the 0.26 ms in which the weight is read, and their logits 4 us. Pieces also
round logits as a whole product does, so what is equal there is equal here.

It does not know what the numbers decide. Shape legend: N rows, E hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from engine_service.kernels.confidence import Confidence, TileParts
from engine_service.kernels.linear import linear
from engine_service.kernels.streams import Streams
from engine_service.kernels.vocab_share import VocabShare
from engine_service.kernels.vocab_tiles import TILE

PIECE_BYTES = 32 << 20
"""Most of a piece, so that it stays in the cache of a large device, but a tile a row at least."""


def head_pieces(x_NE: torch.Tensor, weight_VE: torch.Tensor, width: int) -> Iterator[torch.Tensor]:
    """The logits x W^T, `width` ids at a time; each is multiplied when it is asked for."""
    for first in range(0, weight_VE.shape[0], width):
        yield linear(x_NE, weight_VE[first : first + width])


def piece_width(num_rows: int, vocab: int, dtype: torch.dtype) -> int:
    """Ids of a piece, whole tiles; all pieces are about as wide."""
    most = max(1, PIECE_BYTES // (num_rows * dtype.itemsize * TILE))
    num_tiles = -(-vocab // TILE)
    num_pieces = -(-num_tiles // most)
    return -(-num_tiles // num_pieces) * TILE


def head_confidence_triton(
    x_NE: torch.Tensor,
    weight_VE: torch.Tensor,
    streams: Streams | None = None,
    banned_ids: torch.Tensor | None = None,
    share: VocabShare | None = None,
) -> Confidence:
    """`confidence_of_pieces` of the logits x W^T, or of the share of them that this rank has.

    `streams`: a row of a temperature above 0 draws its token, as `draw_tokens_triton` does. Two
    launches a piece and one more, nothing waits, and all sizes follow from the arguments' shapes.
    """
    num_rows, vocab = x_NE.shape[0], weight_VE.shape[0]
    parts = TileParts(num_rows, vocab, x_NE.device, share)
    width, first = piece_width(num_rows, vocab, x_NE.dtype), 0
    for piece in head_pieces(x_NE, weight_VE, width):
        parts.add(piece, first, banned_ids, streams)
        first += width
        # The loop's own reference would keep the piece while the next one is made.
        del piece
    return parts.confidence()

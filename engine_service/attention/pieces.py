"""Cuts a step's spans into pieces and groups pieces of equal shape for dense calls.

Host integers only, apart from `read_spans`; it does not know how attention is computed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from engine_service.attention.base import AttentionBatch
from engine_service.core.step import Span

MAX_QUERIES = 256
"""Longest piece of a span in one call: bounds the mask, and what lies above the causal diagonal is
computed in vain only inside a piece."""
MIN_WIDTH = 256
"""Pieces with fewer keys share one call; above, those whose widths are within a factor of two."""
MAX_MASK = 1 << 24
"""Elements of a group's mask: 64 MB in float32."""

MAX_KEYS = 1 << 18
"""Keys gathered for one call: 1 GiB of keys and values at 8 heads of 128 in half formats."""


class Piece(NamedTuple):
    """Queries of one span, [first, first + length) among the step's tokens, and the keys
    [kv_start, kv_stop) that hold all they may see; kv_start lies on a page border."""

    span: int
    first: int
    length: int
    kv_start: int
    kv_stop: int


def read_spans(batch: AttentionBatch) -> list[Span]:
    """Spans out of the tensors. Waits for the device."""
    borders = batch.cu_seqlens_q.tolist()
    starts = batch.positions[batch.cu_seqlens_q[:-1].long()].tolist()
    kv_lens, blocks = batch.kv_lens.tolist(), batch.mask_block.tolist()
    return [
        Span(index, start, start + stop - first, kv_len, block, 0, 0)
        for index, (start, (first, stop), kv_len, block) in enumerate(
            zip(starts, pairwise(borders), kv_lens, blocks, strict=True)
        )
    ]


def cut_spans(spans: Sequence[Span], *, page_size: int, window: int | None) -> list[Piece]:
    """Pieces of at most MAX_QUERIES queries, each with the keys it may see."""
    pieces = []
    first = 0
    for index, span in enumerate(spans):
        for start in range(span.start, span.stop, MAX_QUERIES):
            stop = min(start + MAX_QUERIES, span.stop)
            seen = ((stop - 1) // span.mask_block + 1) * span.mask_block
            oldest = 0 if window is None else max(start - window + 1, 0)
            kv_start = oldest // page_size * page_size
            pieces.append(Piece(index, first, stop - start, kv_start, min(span.kv_len, seen)))
            first += stop - start
    return pieces


def group_pieces(pieces: Sequence[Piece], *, group_size: int) -> list[list[Piece]]:
    """Pieces that go into one call: equal length, similar width, within MAX_MASK and MAX_KEYS."""
    kinds: dict[tuple[int, int], list[Piece]] = defaultdict(list)
    for piece in pieces:
        width = piece.kv_stop - piece.kv_start
        kinds[piece.length, ((width - 1) // MIN_WIDTH).bit_length()].append(piece)
    groups = []
    for (length, magnitude), members in kinds.items():
        width = MIN_WIDTH << magnitude
        size = max(min(MAX_MASK // (length * group_size * width), MAX_KEYS // width), 1)
        groups += [members[i : i + size] for i in range(0, len(members), size)]
    return groups

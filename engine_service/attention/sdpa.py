"""Attention with PyTorch's own operators, for the CPU and any device without a better library.

Spans of equal shape share one dense call: their pages are gathered once per layer into [n, K, L, D]
and the query heads of a key-value head are packed along the query axis, so nothing is repeated.
Single queries on the CPU gather only the keys. It knows no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from engine_service.attention.base import (
    AttentionBackend,
    AttentionBatch,
    LayerCache,
    zero_pages,
)
from engine_service.attention.pieces import Piece, cut_spans, group_pieces, read_spans
from engine_service.core.step import Span
from engine_service.kernels.store_kv import store_kv
from engine_service.kernels.weighted_rows import weighted_rows
from engine_service.staging import stage

_ROW_FORMATS = (torch.float32, torch.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """n pieces of equal query length Q, padded to L = W * G keys."""

    tokens: torch.Tensor | None
    """[n * Q] int64, or None when the group is the whole step in order."""
    size: tuple[int, int]
    """(n, Q)."""
    head_pages: torch.Tensor
    """[n * K * W] int64: rows of a [N * K, G * D] view; padding repeats the piece's first page,
    which is finite."""
    mask: torch.Tensor
    """[n, 1, group * Q, L] additive, in the model's format; the third axis is 1 where Q is. With
    `value_rows` [n * K, 1, L]."""
    value_rows: torch.Tensor | None
    """[n * H, L] int64: the keys of every query head as rows of a [N * K * G, D] view; None when
    values are gathered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    groups: tuple[_Group, ...]
    page: torch.Tensor
    """[T] int64."""
    offset: torch.Tensor
    """[T] int64."""
    tail: tuple[torch.Tensor, torch.Tensor] | None
    """Pages and offsets behind the end of spans that enter a page in this step."""
    scratch: torch.Tensor
    """[2, elements of the largest group]: gathered keys and values, one allocation for all groups
    and layers."""


class SdpaBackend(AttentionBackend):
    """Grouped dense attention; float64, float32, bfloat16 and float16."""

    name = "sdpa"

    def empty_cache(self, num_pages: int, device: torch.device) -> LayerCache:
        """Head-major pages: a gathered head is contiguous, which halves the time of the product
        from 512 keys on."""
        shape = self.shape
        size = (num_pages, shape.num_kv_heads, shape.page_size, shape.head_dim)
        k, v = (zero_pages(size, shape.dtype, device) for _ in "kv")
        return LayerCache(k=k.transpose(1, 2), v=v.transpose(1, 2))

    def plan(self, batch: AttentionBatch, *, window: int | None) -> _Plan:
        spans = batch.spans if batch.spans is not None else read_spans(batch)
        page_size = self.shape.page_size
        pieces = cut_spans(spans, page_size=page_size, window=window)
        groups = tuple(
            self._plan_group(group, batch, window)
            for group in group_pieces(pieces, group_size=self.shape.group_size)
        )
        rows = max(group.head_pages.shape[0] for group in groups)
        scratch = groups[0].mask.new_empty(2, rows * page_size * self.shape.head_dim)
        return _Plan(
            groups=groups,
            page=batch.slot_mapping // page_size,
            offset=batch.slot_mapping % page_size,
            tail=_entered_tails(spans, batch, page_size),
            scratch=scratch,
        )

    def store(
        self,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        *,
        cache: LayerCache,
        plan: object,
        slots: torch.Tensor,
    ) -> None:
        assert isinstance(plan, _Plan)
        store_kv(cache.k, k_TKD, plan.page, plan.offset)
        store_kv(cache.v, v_TKD, plan.page, plan.offset)

    def attend(
        self, q_THD: torch.Tensor, *, cache: LayerCache, plan: object, scale: float
    ) -> torch.Tensor:
        assert isinstance(plan, _Plan)
        if plan.tail is not None:
            # A zero of the host would make the device wait for it.
            zero = cache.k.new_zeros(())
            cache.k.index_put_(plan.tail, zero)
            cache.v.index_put_(plan.tail, zero)
        if len(plan.groups) == 1 and plan.groups[0].tokens is None:
            return self._attend(q_THD, cache, plan.groups[0], plan.scratch, scale)
        out = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
        for group in plan.groups:
            assert group.tokens is not None
            part = q_THD.index_select(0, group.tokens)
            part = self._attend(part, cache, group, plan.scratch, scale)
            out.index_copy_(0, group.tokens, part)
        return out

    def _attend(
        self,
        q_THD: torch.Tensor,
        cache: LayerCache,
        group: _Group,
        scratch: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        if group.value_rows is not None:
            return self._attend_rows(q_THD, cache, group, group.value_rows, scratch[0], scale)
        num, length = group.size
        shape = self.shape
        heads = (shape.num_kv_heads, shape.group_size)
        q = q_THD.view(num, length, *heads, shape.head_dim).permute(0, 2, 3, 1, 4)
        out = functional.scaled_dot_product_attention(
            q.reshape(num, heads[0], heads[1] * length, shape.head_dim),
            _gather(cache.k, group, scratch[0]),
            _gather(cache.v, group, scratch[1]),
            attn_mask=group.mask,
            scale=scale,
        )
        out = out.view(num, *heads, length, shape.head_dim).permute(0, 3, 1, 2, 4)
        return out.reshape(q_THD.shape)

    def _attend_rows(
        self,
        q_THD: torch.Tensor,
        cache: LayerCache,
        group: _Group,
        value_rows: torch.Tensor,
        scratch: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """One query per span: the weighted sum reads the values where they lie.

        There is nothing to reuse that a copy would pay for: a step of 32 rows at 192 keys takes
        0.45 instead of 0.80 ms a layer (docs/performance.md).
        """
        shape = self.shape
        k = _gather(cache.k, group, scratch).flatten(0, 1)
        q = q_THD.reshape(k.shape[0], shape.group_size, shape.head_dim)
        weights = torch.baddbmm(group.mask, q, k.transpose(1, 2), alpha=scale).softmax(-1)
        values = cache.v.transpose(1, 2).view(-1, shape.head_dim)
        return weighted_rows(values, value_rows, weights.view(value_rows.shape)).view(q_THD.shape)

    def _plan_group(
        self, pieces: Sequence[Piece], batch: AttentionBatch, window: int | None
    ) -> _Group:
        shape, device = self.shape, batch.positions.device
        page_size, num, length = shape.page_size, len(pieces), pieces[0].length
        width = max(-(-(piece.kv_stop - piece.kv_start) // page_size) for piece in pieces)
        in_order = num * length == batch.positions.shape[0] and all(
            piece.first == index * length for index, piece in enumerate(pieces)
        )
        (fields,) = stage([np.array(pieces, dtype=np.int64)], device)
        span, first, _, kv_start, kv_stop = fields.unbind(1)
        tokens = (first[:, None] + torch.arange(length, device=device)).view(-1)
        pages = _pages(batch.page_table, span, kv_start // page_size, kv_stop, width, page_size)
        heads = torch.arange(shape.num_kv_heads, device=device)[:, None]
        head_pages = pages[:, None, :] * shape.num_kv_heads + heads
        mask = self._mask(batch, window, span, tokens, kv_start, width * page_size)
        value_rows = None
        if length == 1 and device.type == "cpu" and shape.dtype in _ROW_FORMATS:
            mask = mask.expand(-1, shape.num_kv_heads, -1, -1).flatten(0, 1)
            value_rows = self._value_rows(head_pages)
        return _Group(
            tokens=None if in_order else tokens,
            size=(num, length),
            head_pages=head_pages.view(-1),
            mask=mask,
            value_rows=value_rows,
        )

    def _value_rows(self, head_pages: torch.Tensor) -> torch.Tensor:
        """[n * H, L] from [n, K, W]."""
        shape = self.shape
        num, _, width = head_pages.shape
        slots = head_pages[..., None] * shape.page_size + torch.arange(shape.page_size)
        rows = slots.view(num, shape.num_kv_heads, 1, width * shape.page_size)
        return rows.expand(-1, -1, shape.group_size, -1).reshape(num * shape.num_heads, -1)

    def _mask(
        self,
        batch: AttentionBatch,
        window: int | None,
        span: torch.Tensor,
        tokens: torch.Tensor,
        kv_start: torch.Tensor,
        num_keys: int,
    ) -> torch.Tensor:
        """[n, 1, group * Q, L]: 0 where a query may look, -inf elsewhere."""
        num, length = span.shape[0], tokens.shape[0] // span.shape[0]
        query = batch.positions[tokens].view(num, length, 1)
        block = batch.mask_block[span].view(num, 1, 1)
        key = kv_start.view(num, 1, 1) + torch.arange(num_keys, device=span.device)
        end = torch.minimum(batch.kv_lens[span].view(num, 1, 1), (query // block + 1) * block)
        hidden = key >= end
        if window is not None:
            hidden |= key <= query - window
        mask = torch.zeros(hidden.shape, dtype=self.shape.dtype, device=span.device)
        mask = mask.masked_fill_(hidden, float("-inf")).unsqueeze(1)
        if length == 1:
            return mask
        return mask.repeat(1, 1, self.shape.group_size, 1)


def _pages(
    table: torch.Tensor,
    span: torch.Tensor,
    first_page: torch.Tensor,
    kv_stop: torch.Tensor,
    width: int,
    page_size: int,
) -> torch.Tensor:
    """[n, W] int64 pages; behind a piece's last page its first one stands again, so that what is
    gathered is finite: a masked key has weight 0, and 0 times NaN would still be NaN."""
    column = first_page[:, None] + torch.arange(width, device=table.device)
    pages = table[span[:, None], column.clamp(max=table.shape[1] - 1)].long()
    return torch.where(column * page_size < kv_stop[:, None], pages, pages[:, :1])


def _entered_tails(
    spans: Sequence[Span], batch: AttentionBatch, page_size: int
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """(pages, offsets) of unwritten slots that will be gathered for the first time.

    A page's first write covers its first slot, so its tail is cleared once, in the step that
    enters it, instead of masking gathered values in every layer of every step.
    """
    slots = [
        (index, (span.kv_len - 1) // page_size, offset)
        for index, span in enumerate(spans)
        if span.start <= (span.kv_len - 1) // page_size * page_size
        for offset in range((span.kv_len - 1) % page_size + 1, page_size)
    ]
    if not slots:
        return None
    (fields,) = stage([np.array(slots, dtype=np.int64)], batch.positions.device)
    span, column, offset = fields.unbind(1)
    return batch.page_table[span, column].long(), offset


def _gather(pages_NGKD: torch.Tensor, group: _Group, scratch: torch.Tensor) -> torch.Tensor:
    """[n, K, L, D] keys or values of a group."""
    num_pages, page_size, num_heads, head_dim = pages_NGKD.shape
    rows = pages_NGKD.transpose(1, 2).view(num_pages * num_heads, page_size * head_dim)
    size = (group.head_pages.shape[0], page_size * head_dim)
    gathered = scratch[: size[0] * size[1]].view(size)
    torch.index_select(rows, 0, group.head_pages, out=gathered)
    return gathered.view(group.size[0], num_heads, -1, head_dim)

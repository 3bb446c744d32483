"""Attention written out span by span, to compare every other library with. Slow on purpose."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch

from engine_service.attention.base import AttentionBackend, AttentionBatch, LayerCache
from engine_service.kernels.store_kv import store_kv_ref


class _Plan(NamedTuple):
    batch: AttentionBatch
    window: int | None


class ReferenceBackend(AttentionBackend):
    """One dense softmax per span, in float32 or, for float64 inputs, in float64."""

    name = "reference"

    def plan(self, batch: AttentionBatch, *, window: int | None) -> _Plan:
        return _Plan(batch, window)

    def store(
        self,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        *,
        cache: LayerCache,
        plan: object,
        slots: torch.Tensor,
    ) -> None:
        store_kv_ref(cache.k, k_TKD, slots)
        store_kv_ref(cache.v, v_TKD, slots)

    def attend(
        self, q_THD: torch.Tensor, *, cache: LayerCache, plan: object, scale: float
    ) -> torch.Tensor:
        assert isinstance(plan, _Plan)
        borders = plan.batch.cu_seqlens_q.tolist()
        spans = [
            self._attend(q_THD[start:stop], cache, plan, span, start, scale)
            for span, (start, stop) in enumerate(pairwise(borders))
        ]
        return torch.cat(spans)

    def _attend(
        self,
        q_QHD: torch.Tensor,
        cache: LayerCache,
        plan: _Plan,
        span: int,
        start: int,
        scale: float,
    ) -> torch.Tensor:
        batch, shape = plan.batch, self.shape
        kv_len = int(batch.kv_lens[span])
        pages = batch.page_table[span, : -(-kv_len // shape.page_size)].long()
        positions = batch.positions[start : start + q_QHD.shape[0]]
        visible = visible_keys(
            positions, kv_len, int(batch.mask_block[span]), plan.window, num_keys=kv_len
        )
        wide = torch.float64 if q_QHD.dtype == torch.float64 else torch.float32
        k, v = (
            kept[pages].flatten(0, 1)[:kv_len].repeat_interleave(shape.group_size, dim=1).to(wide)
            for kept in (cache.k, cache.v)
        )
        scores = torch.einsum("qhd,lhd->hql", q_QHD.to(wide), k) * scale
        weights = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
        return torch.einsum("hql,lhd->qhd", weights, v).to(q_QHD.dtype)


def visible_keys(
    positions_Q: torch.Tensor, kv_len: int, mask_block: int, window: int | None, *, num_keys: int
) -> torch.Tensor:
    """[Q, num_keys] bool: the mask rule of AttentionBatch, one line per clause."""
    query = positions_Q[:, None]
    key = torch.arange(num_keys, device=positions_Q.device)[None, :]
    seen = (key < kv_len) & (key < (query // mask_block + 1) * mask_block)
    return seen if window is None else seen & (key > query - window)

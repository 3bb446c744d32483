"""The attention layer: positions, norms and the cache around an attention library.

It picks its own cache and plan out of the step and knows no library.
"""

from __future__ import annotations

import torch

from engine_service.attention.base import AttentionStep, KeptKeys
from engine_service.distributed import ALONE, Group
from engine_service.kernels.jit import runs_triton
from engine_service.kernels.keep_keys import keep_keys
from engine_service.kernels.key_scores import Cache
from engine_service.kernels.qk_rope_store import qk_rope_store
from engine_service.kernels.rotary import rotate
from engine_service.layers.norm import HeadNorm


class PagedAttention:
    """Softmax attention of one layer over the paged cache; it holds no parameters.

    Shape legend: T tokens, H query heads, K key-value heads, D head size.
    """

    def __init__(
        self,
        layer: int,
        *,
        window: int | None,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        group: Group = ALONE,
    ) -> None:
        """The heads are this rank's own; `group` has all of them."""
        self.layer = layer
        self.window = window
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.scale = head_dim**-0.5
        self._sum_ranks = group.sum_ if group.size > 1 else None

    def __call__(
        self,
        qkv_TC: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        norm: HeadNorm | None,
        step: AttentionStep,
    ) -> torch.Tensor:
        """[T, (H + 2 K) D] to [T, H D]: normalise heads, rotate, store, attend."""
        aside = step.aside
        if aside is None:
            return self._attend(qkv_TC, rotary, norm, step)
        first = aside.first
        (cos, sin), behind = rotary, slice(first, None)
        mixed = self._attend(
            qkv_TC[behind], (cos[behind], sin[behind]), norm, aside.step, aside.kept
        )
        if not first:
            return mixed
        paged = self._attend(qkv_TC[:first], (cos[:first], sin[:first]), norm, step)
        return torch.cat((paged, mixed))

    def _attend(
        self,
        qkv_TC: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        norm: HeadNorm | None,
        step: AttentionStep,
        kept: KeptKeys | None = None,
    ) -> torch.Tensor:
        place = self._place_fused if runs_triton(qkv_TC) else self._place
        cache = step.caches[self.layer]
        q_THD = place(qkv_TC, rotary, norm, step)
        mixed = step.backend.attend(
            q_THD, cache=cache, plan=step.plans[self.window], scale=self.scale
        )
        if kept is not None:
            own, pages = cache, kept.caches[self.layer]
            caches = Cache(own.k, own.v), Cache(pages.k, pages.v)
            keep_keys(q_THD, *caches, kept.spans, kept.bounds, self._sum_ranks)
        return mixed.flatten(1)

    def _place_fused(
        self,
        qkv_TC: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        norm: HeadNorm | None,
        step: AttentionStep,
    ) -> torch.Tensor:
        cache = step.caches[self.layer]
        return qk_rope_store(
            qkv_TC,
            *rotary,
            norm_weight=None if norm is None else norm.weight,
            eps=0.0 if norm is None else norm.eps,
            k_pages=cache.k,
            v_pages=cache.v,
            slots=step.slots,
            num_heads=self.num_heads,
        )

    def _place(
        self,
        qkv_TC: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        norm: HeadNorm | None,
        step: AttentionStep,
    ) -> torch.Tensor:
        qkv = qkv_TC.view(qkv_TC.shape[0], -1, self.head_dim)
        qk, v_TKD = qkv[:, : -self.num_kv_heads], qkv[:, -self.num_kv_heads :]
        if norm is not None:
            qk = norm(qk)
        # Query and key heads turn by the same angles: one pass over both.
        qk = rotate(qk, *rotary)
        step.backend.store(
            qk[:, self.num_heads :],
            v_TKD,
            cache=step.caches[self.layer],
            plan=step.plans[self.window],
            slots=step.slots,
        )
        return qk[:, : self.num_heads]

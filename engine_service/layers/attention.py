"""The attention layer: picks its own cache and plan out of the step. It knows no library."""

from __future__ import annotations

import torch

from engine_service.attention.base import AttentionStep


class PagedAttention:
    """Softmax attention of one layer over the paged cache; it holds no parameters."""

    def __init__(self, layer: int, *, window: int | None, head_dim: int) -> None:
        self.layer = layer
        self.window = window
        self.scale = head_dim**-0.5

    def __call__(
        self, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, step: AttentionStep
    ) -> torch.Tensor:
        """Stores k and v, then attends; [T, H, D]."""
        return step.backend.forward(
            q_THD,
            k_TKD,
            v_TKD,
            cache=step.caches[self.layer],
            plan=step.plans[self.window],
            scale=self.scale,
        )

"""Number formats of linear layers: how weights are held and how they multiply.

A scheme does not know sharding or which projection it serves.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch


class LinearScheme(ABC):
    """One number format. Shapes: T tokens, I inputs, O outputs."""

    name: str

    @abstractmethod
    def create(
        self,
        in_size: int,
        out_size: int,
        *,
        bias: bool,
        device: torch.device,
        dtype: torch.dtype,
    ) -> dict[str, torch.Tensor]:
        """Uninitialised tensors by parameter name; the first axis of each is the output axis."""

    @abstractmethod
    def apply(
        self,
        x_TI: torch.Tensor,
        weights: dict[str, torch.Tensor],
        *,
        norm: tuple[torch.Tensor, float] | None = None,
        gated: bool = False,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[T, I] to [T, O], in `out` where that is given (without norm).

        `norm` (weight, eps): x is RMS-normalised first. `gated`: the first half of the outputs is
        a gate, silu(gate) * rest, [T, O / 2].
        """

    @abstractmethod
    def add(
        self, residual_TO: torch.Tensor, x_TI: torch.Tensor, weights: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        """residual + apply(x); `residual` is overwritten and returned."""

"""Whose random numbers a row of logits draws. It launches nothing.
Shape legend: N rows of logits, R lines of the tables.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Streams(NamedTuple):
    """Which random numbers every row of logits draws, and how hot; in the kernels' order."""

    rows: torch.Tensor
    """[N] int64: line of the tables."""
    positions: torch.Tensor
    """[N] int64."""
    draws: torch.Tensor
    """[N] int64."""
    temperature: torch.Tensor
    """[R] float32; 0 is greedy."""
    seeds: torch.Tensor
    """[R] int64."""
    purpose: int

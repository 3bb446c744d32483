"""Device tables that both the runner and the strategies read: one line per row.

Only tensors, no logic: worker/tables.py writes them on admission, `decide` writes `tokens` and
`fixed` thereafter. Shape legend: R rows (max_rows + 1; the last is a trash row for padding),
L table width (max_model_len rounded up to page and block), E bias and stop-id slots, W words of 32
ids.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingTables:
    tokens: torch.Tensor
    """[R, L] int64: committed tokens, then the canvas; mask tokens behind (0 where the model has
    no mask token)."""
    fixed: torch.Tensor
    """[R, L] bool: the position's token is decided. Never inferred from the token's value."""
    prompt_lens: torch.Tensor
    """[R] int64."""
    temperature: torch.Tensor
    """[R] float32; 0 is greedy."""
    top_p: torch.Tensor
    """[R] float32; 1 is off."""
    top_k: torch.Tensor
    """[R] int64; 0 is off."""
    min_p: torch.Tensor
    """[R] float32; 0 is off."""
    repetition_penalty: torch.Tensor
    """[R] float32; 1 is off."""
    presence_penalty: torch.Tensor
    """[R] float32; 0 is off."""
    frequency_penalty: torch.Tensor
    """[R] float32; 0 is off."""
    seeds: torch.Tensor
    """[R] int64: request seed mixed with the choice index."""
    min_tokens: torch.Tensor
    """[R] int64: `suppress_ids` are forbidden while fewer tokens than this are out."""
    suppress_ids: torch.Tensor
    """[R, E] int64, -1 behind the last one."""
    bias_ids: torch.Tensor
    """[R, E] int64, -1 behind the last one."""
    bias_values: torch.Tensor
    """[R, E] float32."""
    banned_ids: torch.Tensor
    """[any] int64: ids that no row may ever choose (the mask token)."""
    masks: torch.Tensor | None = None
    """[R, W] int32: bitmasks of the ids that a row may choose, all bits set without a say; None: no
    row ever had one."""

"""The one table of masks: which ids each row may choose, from whoever says so.

It does not know grammars, lists or requests: masks come ready, as bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engine_service.core.step import NewRow, RowMask
from engine_service.staging import stage


class MaskTable:
    """`words` [R, W] int32, the last line for padding. Made when the first row brings a mask: who
    never does pays nothing. `has_mask` [R] bool, on the host, says whose line counts; the others
    have all bits."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self.words: torch.Tensor | None = None
        self.has_mask = np.zeros(num_rows, dtype=np.bool_)
        self._device = device
        self._written = np.zeros(num_rows, dtype=np.bool_)
        """Lines that may lack bits."""

    def apply(self, new_rows: Sequence[NewRow], masks: Sequence[RowMask]) -> None:
        """New rows lose what the line's last owner had; then masks are written, in one copy."""
        taken = [new.row for new in new_rows]
        self.has_mask[taken] = False
        lines: dict[int, bytes | None] = {
            new.row: new.mask for new in new_rows if new.mask is not None or self._written[new.row]
        }
        lines |= {one.row: one.mask for one in masks}
        if lines:
            self._write(lines)

    def _write(self, lines: dict[int, bytes | None]) -> None:
        rows = np.array(list(lines), dtype=np.int64)
        kept = np.array([mask is not None for mask in lines.values()])
        self.has_mask[rows] = self._written[rows] = kept
        known = [np.frombuffer(mask, dtype=np.int32) for mask in lines.values() if mask is not None]
        if self.words is None:
            shape = (len(self.has_mask), len(known[0]))
            self.words = torch.full(shape, -1, dtype=torch.int32, device=self._device)
        words = np.full((len(rows), self.words.shape[1]), -1, dtype=np.int32)
        if known:
            words[kept] = known
        at, values = stage([rows, words], self._device)
        self.words.index_copy_(0, at, values)

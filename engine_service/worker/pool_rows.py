"""Which rows are pooled, how, and what their prompts have summed up to.

It does not know spans or models.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import torch

from engine_service.core.params import PoolingParams
from engine_service.core.step import NewRow


class PoolKind(IntEnum):
    """Which positions count. NONE: the row is not pooled."""

    NONE = 0
    MEAN = 1
    LAST = 2
    CLS = 3


class PoolRows:
    """The rows whose hidden states are pooled, and their sums. Written when a row is taken."""

    def __init__(self, max_rows: int, hidden_size: int, device: torch.device) -> None:
        num_rows = max_rows + 1
        self.sums = torch.zeros(num_rows, hidden_size, dtype=torch.float32, device=device)
        self.kind = np.full(num_rows, PoolKind.NONE, dtype=np.int64)
        self.length = np.ones(num_rows, dtype=np.int64)
        self.dimensions = np.zeros(num_rows, dtype=np.int64)
        self.normalize = np.zeros(num_rows, dtype=np.bool_)
        self.classifies = np.zeros(num_rows, dtype=np.bool_)

    def admit(self, new_rows: Sequence[NewRow]) -> None:
        """Rows that anybody takes: those of others are pooled no longer."""
        for new in new_rows:
            params = new.params
            if not isinstance(params, PoolingParams):
                self.kind[new.row] = PoolKind.NONE
                continue
            self.kind[new.row] = PoolKind[params.kind.upper()]
            self.length[new.row] = new.prompt_len
            self.dimensions[new.row] = params.dimensions
            self.normalize[new.row] = params.normalize
            self.classifies[new.row] = params.classifies

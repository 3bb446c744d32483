"""Which pages hold a row's keys and values: on the host, and in the device's copy that steps read.

Of many rows that decode, one or another gets a page in every step. A copy and a kernel of their own
between two replayed steps cost 90 to 175 us on an H200 (docs/performance.md), so a single page is
told late: among the arrays of the next step of its row. It does not know requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from engine_service.core.step import PageAppend
from engine_service.staging import stage

_KNOWN, _FRESH = -1, -2
"""Instead of a late entry: the device's line is the host's; it is still that of another request."""


class LatePages(NamedTuple):
    """What the device learns of the rows of a step: int32 `entries` of their lines, below 0 where
    it is nothing, and the pages that stand there."""

    entries: np.ndarray
    pages: np.ndarray


class PageTable:
    """Lines of rows. Entries that were never appended name the trash page."""

    def __init__(
        self,
        num_rows: int,
        num_pages: int,
        trash_page: int,
        device: torch.device,
        *,
        tells_late: bool | None = None,
    ) -> None:
        """`tells_late`: steps bring late pages along (None: those of a GPU do)."""
        shape = (num_rows, num_pages)
        self.tells_late = device.type == "cuda" if tells_late is None else tells_late
        self.trash_page = trash_page
        self.on_device = torch.full(shape, trash_page, dtype=torch.int32, device=device)
        """[R, P] int32."""
        self.on_host = np.full(shape, trash_page, dtype=np.int64)
        self._late = np.full(num_rows, _FRESH, dtype=np.int32)

    def forget(self, row: int) -> None:
        """Another request has it from now on."""
        self.on_host[row] = self.trash_page
        self._late[row] = _FRESH

    def append(self, page_appends: Sequence[PageAppend]) -> None:
        """Writes what cannot wait in one write, however many rows there are."""
        max_pages, late, whole = self.on_host.shape[1], self._late, set[int]()
        for row, index, pages in page_appends:
            assert index + len(pages) <= max_pages, f"row {row}: page {index} of {max_pages}"
            self.on_host[row, index : index + len(pages)] = pages
            if self.tells_late and len(pages) == 1 and late[row] == _KNOWN:
                late[row] = index
            else:
                whole.add(row)
        if whole:
            rows = np.array(sorted(whole), dtype=np.int64)
            at, lines = stage([rows, self.on_host[rows].astype(np.int32)], self.on_device.device)
            self.on_device.index_copy_(0, at, lines)
            late[rows] = _KNOWN

    def late_of(self, rows: np.ndarray) -> LatePages | None:
        """What a step of these rows must tell the device; None: no step does."""
        if not self.tells_late:
            return None
        entries = self._late[rows]
        return LatePages(entries, self.on_host[rows, np.maximum(entries, 0)].astype(np.int32))

    def told(self, rows: np.ndarray) -> None:
        """A step with `late_of` these rows is launched."""
        if self.tells_late:
            self._late[rows] = np.minimum(self._late[rows], _KNOWN)

"""Whole pages of the KV pool as bytes that any engine of the same model reads.

It does not know whose pages they are, nor how many ranks hold them. Shape legend:
worker.page_shares.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

import torch

from engine_service.core.handoff import SharedPiece
from engine_service.pieces import Files, Views, check_size
from engine_service.worker.page_shares import PageFormat
from engine_service.worker.pinned import pinned


class WholePages(Protocol):
    """The pages of a whole model: a rank's that holds all of it, or those of all its ranks."""

    @property
    def format(self) -> PageFormat: ...

    @property
    def device(self) -> torch.device:
        """Which host memory that is read and written comes from and goes to."""

    def read(self, pages: Sequence[int], into: torch.Tensor) -> torch.Tensor:
        """`into`, [N, L, 2, G, K, D], contiguous on the host."""

    def write(self, pages: Sequence[int], whole: torch.Tensor) -> None:
        """[N, L, 2, G, K, D], contiguous on the host; no step that is launched next reads anything
        else."""


class PageStore:
    """Implements core.transfers.PageStore."""

    def __init__(self, pages: WholePages) -> None:
        self._pages = pages
        pin = partial(pinned, device=pages.device)
        self._files, self._views = Files(pin), Views(pin)
        self.page_bytes = pages.format.page_bytes

    def read(self, transfer: int, pages: list[int]) -> SharedPiece:
        """Bytes of [N, L, 2, G, K, D], keys before values."""
        opened = self._pages.format.opened
        return self._files.offer(
            transfer,
            len(pages) * self.page_bytes,
            lambda place: self._pages.read(pages, into=opened(place)),
        )

    def write(self, pages: list[int], piece: SharedPiece, num_known: int) -> None:
        """What `read` has read, but for its first `num_known` pages. Raises FailedPrecondition for
        bytes that are not it; pages may have been written then."""
        num_pages = num_known + len(pages)
        check_size(piece, num_pages * self.page_bytes)
        with self._views.opened(piece) as place:
            whole = self._pages.format.opened(place)
            self._pages.write(pages, whole[num_known:])

    def end(self, transfer: int) -> None:
        """Frees what was read for it."""
        self._files.end(transfer)

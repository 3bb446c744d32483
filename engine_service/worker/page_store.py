"""Reads and writes whole pages of the KV pool, as bytes that any engine of the same model reads.

It does not know whose pages they are. Shape legend: N pages, L layers, G page size, K key-value
heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from engine_service.attention.base import LayerCache
from engine_service.core.handoff import KvLayout, Piece
from engine_service.models.base import ModelTraits
from engine_service.worker.checkpoint import Checkpoint
from engine_service.worker.connectors import Inline, Shared, fetch


def read_layout(
    checkpoint: Checkpoint, traits: ModelTraits, dtype: torch.dtype, page_size: int
) -> KvLayout:
    """What a page of one rank that holds the whole model means."""
    return KvLayout(
        model_id=checkpoint.model_id,
        weight_version=checkpoint.weight_version,
        dtype=str(dtype).removeprefix("torch."),
        page_size=page_size,
        num_layers=traits.num_layers,
        num_kv_heads=traits.num_kv_heads,
        head_dim=traits.head_dim,
    )


class PageStore:
    """Implements core.transfers.PageStore. What is read is final and what is written is nobody's,
    so on CUDA both happen beside the step in flight, on a stream of their own."""

    def __init__(self, caches: Sequence[LayerCache], device: torch.device) -> None:
        self._parts = [part for cache in caches for part in (cache.k, cache.v)]
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._inline, self._shared = Inline(), Shared()
        first = self._parts[0]
        self.page_bytes = len(self._parts) * first[0].numel() * first.element_size()

    def read(self, transfer: int, pages: list[int], *, is_shared: bool) -> Piece:
        """Bytes of [N, L, 2, G, K, D], keys before values."""
        with self._beside():
            index = torch.tensor(pages, device=self._device)
            found = torch.stack([part.index_select(0, index) for part in self._parts], dim=1)
            host = found.cpu()
        connector = self._shared if is_shared else self._inline
        return connector.offer(transfer, _bytes_of(host))

    def write(self, pages: list[int], piece: Piece, num_known: int) -> None:
        """What `read` has read, but for its first `num_known` pages. Raises FailedPrecondition for
        bytes that are not it."""
        first = self._parts[0]
        shape = (num_known + len(pages), len(self._parts), *first.shape[1:])
        host = torch.empty(shape, dtype=first.dtype)
        fetch(piece, _bytes_of(host))
        with self._beside():
            index = torch.tensor(pages, device=self._device)
            values = host[num_known:].to(self._device)
            for part, value in zip(self._parts, values.unbind(1), strict=True):
                part.index_copy_(0, index, value)

    def end(self, transfer: int) -> None:
        """Frees what was shared for it."""
        self._shared.end(transfer)

    @contextmanager
    def _beside(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:  # whoever gets the pages next writes to them on another stream
            self._stream.synchronize()


def _bytes_of(host: torch.Tensor) -> memoryview:
    flat: np.ndarray[Any, Any] = host.view(torch.uint8).view(-1).numpy()
    return flat.data

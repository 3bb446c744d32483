"""Reads and writes what one rank holds of whole pages: its layers, and its heads of them.

It does not know whose pages they are, nor the other ranks. Shape legend: worker.page_shares.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from engine_service.core.handoff import KvLayout
from engine_service.distributed import Group
from engine_service.models.base import ModelTraits
from engine_service.worker.checkpoint import Checkpoint
from engine_service.worker.page_shares import PageFormat, share_of


def read_layout(
    checkpoint: Checkpoint, traits: ModelTraits, dtype: torch.dtype, page_size: int
) -> KvLayout:
    """What a page of the whole model means."""
    return KvLayout(
        model_id=checkpoint.model_id,
        weight_version=checkpoint.weight_version,
        dtype=str(dtype).removeprefix("torch."),
        page_size=page_size,
        num_layers=traits.num_layers,
        num_kv_heads=traits.num_kv_heads,
        head_dim=traits.head_dim,
    )


class RankPages:
    """read, write. What is read is final and what is written is nobody's, so on CUDA both happen
    beside the step in flight, on a stream of their own.

    Not so in a pipeline: rank 0 knows what it has collected, which later stages may still have to
    compute. There both come behind all steps that this rank has launched.
    """

    def __init__(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        traits: ModelTraits,
        group: Group,
        device: torch.device,
    ) -> None:
        """`k` and `v` are [l, N, G, k, D]. `format` and `held` are what whole pages are and what
        this rank has of them, by its `share`."""
        _, _, page_size, _, head_dim = k.shape
        num_layers, num_heads = traits.num_layers, traits.num_kv_heads
        self.format = PageFormat((num_layers, 2, page_size, num_heads, head_dim), k.dtype)
        self.share = share_of(group, num_layers, num_heads)
        held = len(self.share.layers), 2, page_size, len(self.share.heads), head_dim
        self.held = PageFormat(held, k.dtype)
        self._k, self._v = k, v
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._is_staged = group.stage.count > 1

    def read(self, pages: Sequence[int], into: torch.Tensor | None = None) -> torch.Tensor:
        """[N, l, 2, G, k, D] on the host, contiguous: `into`, if it is given."""
        host = self.held.empty(len(pages)) if into is None else into
        with self._beside():
            # One way to the host for all of them.
            found = torch.empty_like(host, device=self.device) if self._stream else host
            for page, place in zip(pages, found, strict=True):
                for part, of_page in self._parts(page, place):
                    of_page.copy_(part)
            if found is not host:
                host.copy_(found)
        return host

    def write(self, pages: Sequence[int], host: torch.Tensor) -> None:
        """[N, l, 2, G, k, D] on the host."""
        with self._beside():
            for page, values in zip(pages, host.to(self.device), strict=True):
                for part, of_page in self._parts(page, values):
                    part.copy_(of_page)

    def _parts(
        self, page: int, place: torch.Tensor
    ) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
        """A page's keys and its values, [l, G, k, D] each, and where they are in [l, 2, G, k, D].
        Copied as views: indexed by a tensor, rows of one head take four times as long on a CPU."""
        return (self._k[:, page], place[:, 0]), (self._v[:, page], place[:, 1])

    @contextmanager
    def _beside(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        if self._is_staged:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:  # whoever gets the pages next writes to them on another stream
            self._stream.synchronize()

"""The paged KV tensors, and how many pages fit.

It does not know which page belongs to whom (the core does), nor how memory was measured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine_service.attention.base import AttentionBackend, AttentionShape, LayerCache
from engine_service.config import EngineConfig
from engine_service.core.step import FULL
from engine_service.models.base import ModelTraits
from engine_service.resolve import ResolvedConfig
from engine_service.worker.aside import num_pages_aside
from tidemill.runtime.errors import InvalidRequest

_MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class KVRoom:
    """How many bytes the pool may take, and how an operator makes that more."""

    available_bytes: int
    advice: Callable[[int], str]
    """The flag to paste so that this many bytes are available."""


class KVPool:
    """KV of every layer. The last page is a trash page: padding writes there, nobody reads it."""

    def __init__(
        self, backend: AttentionBackend, num_layers: int, num_pages: int, device: torch.device
    ) -> None:
        self.num_pages = num_pages
        of_all = backend.empty_cache(num_layers * (num_pages + 1), device)
        layers = num_layers, num_pages + 1
        self.k, self.v = (part.unflatten(0, layers) for part in (of_all.k, of_all.v))
        """[L, N, G, K, D], so that a page is one view in all layers."""
        self.caches = tuple(LayerCache(k=k, v=v) for k, v in zip(self.k, self.v, strict=True))
        """One per layer, with N = num_pages + 1 pages."""

    @property
    def num_bytes(self) -> int:
        """Of the real pages."""
        return (self.k.nbytes + self.v.nbytes) // (self.num_pages + 1) * self.num_pages

    @property
    def trash_page(self) -> int:
        """Index of the page behind the last real one."""
        return self.num_pages


def open_cache_aside(
    backend: AttentionBackend, resolved: ResolvedConfig, traits: ModelTraits, device: torch.device
) -> LayerCache | None:
    """One layer's keys and values of a step; None for models whose spans use the pages only."""
    if traits.mask_block < FULL:
        return None
    num_pages = num_pages_aside(resolved.token_budget, resolved.max_rows, resolved.page_size)
    return backend.empty_cache(num_pages, device)


def page_bytes(shape: AttentionShape, num_layers: int) -> int:
    """Keys and values of one page in all layers."""
    values = shape.page_size * shape.num_kv_heads * shape.head_dim
    return 2 * num_layers * values * shape.dtype.itemsize


def count_pages(
    room: KVRoom,
    *,
    requested: int | None,
    bytes_per_page: int,
    pages_per_row: int,
    page_size: int,
    max_rows: int,
) -> int:
    """Pages of the pool: `requested`, else what the room holds, but no more than all rows can use.

    Raises InvalidRequest (reason KV_POOL_TOO_SMALL) when one request of the maximum length, which
    takes `pages_per_row`, would not fit; it says what is needed, what there is and what to pass.
    """
    # One page more than the pool counts is allocated: the trash page.
    fitting = max(0, room.available_bytes // bytes_per_page - 1)
    pages = min(fitting, pages_per_row * max_rows) if requested is None else requested
    if pages >= pages_per_row:
        return pages
    needed = (pages_per_row + 1) * bytes_per_page
    have = (
        f"{_mib(max(0, room.available_bytes))} are available"
        if requested is None
        else f"num_pages {requested} are {_mib(requested * bytes_per_page)}"
    )
    fix = room.advice(needed) if requested is None else f"--num-pages {pages_per_row}"
    longest = pages * page_size
    shorter = f", or --max-model-len {longest} (the longest that fits)" if longest else ""
    raise InvalidRequest(
        f"one request of max_model_len needs {pages_per_row} KV pages ({_mib(needed)}), but"
        f" {have}: pass {fix}{shorter}",
        reason="KV_POOL_TOO_SMALL",
        param="max_model_len" if requested is None else "num_pages",
        facts={
            "needed_bytes": str(needed),
            "available_bytes": str(max(0, room.available_bytes)),
            "estimated_max_model_len": str(longest),
        },
    )


def no_pages(config: EngineConfig) -> int:
    """Of an encoder, whose keys and values are wanted within a step only."""
    if config.num_pages is not None:
        raise InvalidRequest(
            f"num_pages is {config.num_pages}, and this model is an encoder, which keeps no keys"
            " and values; leave it out",
            param="num_pages",
        )
    return 0


def _mib(size: int) -> str:
    return f"{size / _MIB:.1f} MiB"

"""Pages as bytes: what is left out, and who waits for the device."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine_service.distributed import ALONE
from engine_service.worker.page_store import PageStore
from engine_service.worker.rank_pages import RankPages

SHAPE = (6, 4, 2, 8)
"""Pages, slots, heads, head size."""


def make(dtype: torch.dtype = torch.float32) -> tuple[RankPages, list[torch.Tensor]]:
    torch.manual_seed(0)
    k, v = (torch.randn(2, *SHAPE).to(dtype) for _ in "kv")
    traits: Any = SimpleNamespace(num_layers=2, num_kv_heads=SHAPE[2])
    return RankPages(k, v, traits, ALONE, torch.device("cpu")), [k[0], v[0], k[1], v[1]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_known_pages_are_left_out(dtype: torch.dtype) -> None:
    pages, parts = make(dtype)
    store = PageStore(pages)
    before = [part.clone() for part in parts]
    piece = store.read(1, [5, 0, 3])
    store.write([2, 1], piece, 1)
    for part, was in zip(parts, before, strict=True):
        was[2], was[1] = was[0].clone(), was[3].clone()
        assert torch.equal(part, was)
    store.end(1)


def test_the_device_is_waited_for_where_a_write_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pages go to others next, who write to them on another stream."""
    waits = []

    class Stream:
        def synchronize(self) -> None:
            waits.append(1)

    pages, _ = make()
    store = PageStore(pages)
    pages._stream = Stream()  # type: ignore[assignment]
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    piece = store.read(1, [0, 1])
    with pytest.raises(IndexError):
        store.write([2, SHAPE[0]], piece, 0)
    assert len(waits) == 2

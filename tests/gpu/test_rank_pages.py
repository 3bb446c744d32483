"""When a rank reads and writes pages beside its steps, and when behind them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine_service.distributed import Group
from engine_service.stages import Stage
from engine_service.worker.page_store import PageStore
from engine_service.worker.rank_pages import RankPages

pytestmark = pytest.mark.gpu

LONG = 500_000_000
"""Clocks that a step takes: more than 0.2 s on any GPU."""


def make(num_stages: int) -> tuple[RankPages, torch.Tensor]:
    """And its keys and values, [2, l, N, G, K, D]."""
    device = torch.device("cuda")
    parts = torch.zeros(2, 2, 4, 8, 2, 16, dtype=torch.bfloat16, device=device)
    traits: Any = SimpleNamespace(num_layers=2 * num_stages, num_kv_heads=2)
    group = Group(0, 1, Stage(0, num_stages))
    return RankPages(parts[0], parts[1], traits, group, device), parts


@pytest.mark.parametrize("num_stages", [1, 2])
def test_pages_are_moved_behind_the_steps_of_a_stage(num_stages: int) -> None:
    """Beside them where there is one stage, which has collected what it reads and writes."""
    pages, parts = make(num_stages)
    ones = torch.ones(1, *pages.held.shape, dtype=torch.bfloat16)
    pages.write([1], 0 * ones)  # kernels are loaded by now, which waits for the whole device
    assert not pages.read([1]).any()
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    parts.fill_(3)
    found = pages.read([1])
    assert torch.equal(found, (3 if num_stages > 1 else 0) * ones)
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    parts.fill_(5)
    pages.write([1], ones)
    torch.cuda.synchronize()
    assert torch.equal(pages.read([1]), (1 if num_stages > 1 else 5) * ones)
    assert torch.equal(pages.read([0]), 5 * ones)


def test_pieces_go_through_pinned_memory() -> None:
    """On both sides; the files of another process are mapped as these are."""
    (source, parts), (target, others) = make(1), make(1)
    parts.normal_()
    sending, taking = PageStore(source), PageStore(target)
    for pages, places in (([2, 0], [3, 1]), ([1], [2])):
        taking.write(places, sending.read(1, pages), 0)
        assert torch.equal(others[:, :, places], parts[:, :, pages])
    written = [file.memory for file in sending._files._used[1]]
    read = [mapping.memory for mapping in taking._views._mapped.values()]
    assert len(written) == len(read) == 2
    for memory in written + read:
        assert torch.frombuffer(memory, dtype=torch.uint8).is_pinned()

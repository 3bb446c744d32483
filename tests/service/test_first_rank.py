"""Collectives of ranks on CPUs: real ranks over gloo, and what they all must get."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from engine_service import first_rank
from engine_service.distributed import Group
from tests.waiting import PATIENCE_S

FORK = multiprocessing.get_context("fork")
FEW, MANY = (5, 96), (64, 2200)
"""Rows and their width: below and above what goes by way of the first rank."""
FORMATS = (torch.float32, torch.bfloat16, torch.float64)


def part(rank: int, size: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(rank)).to(dtype)


def listed(x: torch.Tensor) -> list[Any]:
    return [*x.shape, *x.double().flatten().tolist()]


def work(rank: int, size: int, folder: Path) -> None:
    """All that a rank finds, as JSON."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    group, found = Group(rank, size), []
    for shape in (FEW, MANY):
        for dtype in FORMATS:
            x = part(rank, shape, dtype)
            found.append(listed(group.join(x[:, ::2])))
            assert group.sum_(x) is x, "in place"
            found.append(listed(x))
    (folder / str(rank)).write_text(json.dumps(found))


@pytest.mark.parametrize("size", [2, 3])
def test_all_ranks_get_the_sum_in_their_order_and_what_is_joined(tmp_path: Path, size: int) -> None:
    assert first_rank.suits(part(0, FEW, torch.float64))
    assert not first_rank.suits(part(0, MANY, torch.float32))
    ranks = [FORK.Process(target=work, args=(rank, size, tmp_path)) for rank in range(size)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(PATIENCE_S)
    assert [rank.exitcode for rank in ranks] == [0] * size
    told = {(tmp_path / str(rank)).read_text() for rank in range(size)}
    assert len(told) == 1, "ranks differ in a bit"
    found = iter(json.loads(told.pop()))
    for shape in (FEW, MANY):
        for dtype in FORMATS:
            parts = [part(rank, shape, dtype) for rank in range(size)]
            assert next(found) == listed(torch.cat([x[:, ::2] for x in parts], dim=1))
            wanted = listed(sum(parts[1:], start=parts[0]))
            if shape == FEW:
                assert next(found) == wanted
            else:  # the library's, in an order of its own
                assert next(found) == pytest.approx(wanted, abs=0.1)


def test_control_another_order_is_another_sum() -> None:
    parts = [part(rank, FEW, torch.float32) for rank in range(3)]
    assert listed(sum(parts[1:], start=parts[0])) != listed(parts[2] + parts[1] + parts[0])

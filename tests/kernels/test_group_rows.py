"""Rows are grouped by expert in their order, over numbers of rows, experts and rows of a tile."""

from __future__ import annotations

import pytest
import torch

from engine_service.kernels.group_rows import group_rows_ref, group_rows_triton

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZES = [(0, 5, 16), (1, 1, 16), (1, 20, 16), (40, 3, 64), (20, 17, 16), (64, 9, 16), (65, 9, 16)]
SIZES += [(256, 9, 16), (257, 9, 16), (1100, 5, 64), (9001, 11, 16)]
SIZES += [(33_000, 5, 64)]
"""Rows, experts, rows of a tile: one slice, several, and slices of several blocks; more experts
than rows, and numbers that are no power of two."""


@pytest.mark.parametrize("size", SIZES)
def test_rows_are_grouped_in_order(size: tuple[int, int, int], seed: int) -> None:
    """Only half of the experts are chosen."""
    num_rows, num_experts, block_m = size
    torch.manual_seed(seed)
    experts = torch.randint(0, (num_experts + 1) // 2, (num_rows,))
    want = group_rows_ref(experts, num_experts, block_m)
    got = group_rows_triton(experts.to(DEVICE), num_experts, block_m)
    assert torch.equal(got.experts.cpu(), want.experts)
    filled = int((want.experts < num_experts).sum()) * block_m
    assert torch.equal(got.rows.cpu()[:filled], want.rows[:filled])
    kept = want.rows[want.rows < num_rows].long()
    assert sorted(kept.tolist()) == list(range(num_rows)), "every row once"
    assert torch.equal(experts[kept], experts.sort(stable=True).values)
    owners = want.experts.repeat_interleave(block_m)[want.rows < num_rows]
    assert torch.equal(owners.long(), experts[kept])


@pytest.mark.parametrize("num_rows", [50, 600])
def test_rows_of_other_ranks_experts_are_in_no_tile(num_rows: int, seed: int) -> None:
    torch.manual_seed(seed)
    experts = torch.randint(-3, 9, (num_rows,))
    want = group_rows_ref(experts, 6, 16)
    got = group_rows_triton(experts.to(DEVICE), 6, 16)
    assert torch.equal(got.experts.cpu(), want.experts)
    filled = int((want.experts < 6).sum()) * 16
    assert torch.equal(got.rows.cpu()[:filled], want.rows[:filled])
    kept = want.rows[want.rows < num_rows].long()
    assert len(kept) == int(((experts >= 0) & (experts < 6)).sum()) < num_rows


@pytest.mark.parametrize("num_rows", [1, 8, 40, 129, 1000])
@pytest.mark.parametrize("num_experts", [1, 8, 60])
def test_there_is_room_for_the_worst_choice(num_rows: int, num_experts: int) -> None:
    """One row for as many experts as possible, all others for the last one: no tile is missing."""
    worst = torch.arange(num_rows).clamp(max=num_experts - 1)
    groups = group_rows_ref(worst, num_experts, 16)
    counts = torch.bincount(worst, minlength=num_experts)
    assert int((groups.experts < num_experts).sum()) == int(((counts + 15) // 16).sum())
    assert len(groups.rows) == 16 * len(groups.experts)

"""Sums over several ranks' memory: the kernel of one rank, whose peers the test plays."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from engine_service.kernels.jit import INTERPRETED
from engine_service.kernels.norm import rms_norm_ref
from engine_service.kernels.peer_sum import (
    MAX_BLOCKS,
    Parts,
    add_parts_ref,
    add_parts_triton,
    release,
)

device = "cuda" if torch.cuda.is_available() else "cpu"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="signals of a device are the peers' own")
LATER = 1 << 20
"""More launches than a test makes: peers that are always there."""


def shared(parts: list[torch.Tensor], rank: int, told: int = LATER) -> Parts:
    """What rank `rank` has; the others have told `told`."""
    size = len(parts)
    signals = [
        torch.full((size, MAX_BLOCKS), told, dtype=torch.int32, device=device) for _ in parts
    ]
    turns = torch.zeros(MAX_BLOCKS, dtype=torch.int32, device=device)
    lines = torch.tensor([line.data_ptr() for line in signals], device=device)
    return Parts(tuple(part.to(device) for part in parts), tuple(signals), lines, turns)


def draw(
    num_ranks: int, rows: int, width: int, dtype: torch.dtype, seed: int
) -> tuple[torch.Tensor, list[torch.Tensor], tuple[torch.Tensor, float]]:
    """(residual, parts, norm); the norm's weight is on the device."""
    torch.manual_seed(seed)
    residual = torch.randn(rows, width).to(dtype)
    parts = [torch.randn(rows, width).to(dtype) for _ in range(num_ranks)]
    return residual, parts, (torch.randn(width).to(dtype).to(device), 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("num_ranks", "rows", "width"),
    [(2, 1, 64), (2, 3, 1000), (3, 2, 1024), (4, 5, 520), (2, MAX_BLOCKS + 3, 96)],
)
def test_every_rank_gets_the_same_sum_and_norm(
    num_ranks: int, rows: int, width: int, dtype: torch.dtype, seed: int
) -> None:
    residual, parts, norm = draw(num_ranks, rows, width, dtype, seed)
    sums, norms = [], []
    for rank in range(num_ranks):
        mine, own = shared(parts, rank), residual.to(device, copy=True)
        normed = add_parts_triton(own, mine, rank, norm)
        assert normed is not None
        sums.append(own.cpu())
        norms.append(normed.cpu())
        told = [int(mine.signals[peer][rank, 0]) for peer in range(num_ranks)]
        assert told == [LATER if peer == rank else 1 for peer in range(num_ranks)]
    for one, two in zip(sums, norms, strict=True):
        assert torch.equal(one, sums[0])
        assert torch.equal(two, norms[0])
    want = residual.clone()
    add_parts_ref(want, tuple(parts))
    # Triton's interpreter cuts bfloat16 off where a device rounds it.
    close = {"rtol": 2**-6 if dtype.itemsize == 2 else 1e-5, "atol": 1e-5}
    torch.testing.assert_close(sums[0], want, **close)
    wanted = rms_norm_ref(sums[0], norm[0].cpu(), norm[1])
    torch.testing.assert_close(norms[0], wanted, **close)


def test_a_sum_that_nobody_norms_is_the_same() -> None:
    parts = [torch.randn(3, 96) for _ in range(2)]
    one, other = torch.zeros(3, 96, device=device), torch.zeros(3, 96, device=device)
    assert add_parts_triton(one, shared(parts, 0), 0) is None
    assert (
        add_parts_triton(other, shared(parts, 0), 0, (torch.ones(96, device=device), 1e-6))
        is not None
    )
    assert torch.equal(one, other)
    assert torch.equal(one.cpu(), parts[0] + parts[1])


def test_the_order_of_ranks_counts() -> None:
    """Control: in another order float32 sums have other bits."""
    torch.manual_seed(1)
    parts = tuple(torch.randn(4, 512) * 10**power for power in (-3, 4, 0))
    residual = torch.randn(4, 512)
    one, other = residual.clone(), residual.clone()
    add_parts_ref(one, parts)
    add_parts_ref(other, parts[::-1])
    assert not torch.equal(one, other)


def test_launches_are_counted_on_the_device() -> None:
    mine = shared([torch.ones(2, 1024)] * 2, 1)
    residual = torch.zeros(2, 1024, device=device)
    for turn in range(1, 4):
        add_parts_triton(residual, mine, 1)
        assert int(residual[0, 0]) == 2 * turn
        assert mine.signals[0][1, :2].tolist() == [turn, turn]
        assert mine.signals[0][1, 2] == LATER, "a block that was not launched told something"


def add_beside(
    mine: Parts, residual: torch.Tensor, add: Callable[..., object] = add_parts_triton
) -> threading.Thread:
    """The kernel of rank 1 in a thread, which waits for its peer."""
    thread = threading.Thread(target=add, args=(residual, mine, 1), daemon=True)
    thread.start()
    thread.join(0.2)
    return thread


@interpreted
@pytest.mark.parametrize("turns", [0, 5, 2**31 - 2, 2**31 - 1, -(2**31), -1])
def test_it_waits_until_the_peers_have_told_this_turn(turns: int) -> None:
    """Also where the count of launches goes over the end of its numbers."""
    mine = shared([torch.zeros(1, 64), torch.ones(1, 64)], 1, told=turns)
    mine.turns.fill_(turns)
    residual = torch.zeros(1, 64)
    thread = add_beside(mine, residual)
    assert thread.is_alive(), "it has not waited"
    mine.parts[0].fill_(3.0)
    mine.signals[1][0] += 1
    thread.join(10.0)
    assert not thread.is_alive()
    assert torch.equal(residual, torch.full((1, 64), 4.0))


@interpreted
@pytest.mark.parametrize("turns", [0, 2**31 - 1])
def test_a_released_rank_waits_for_nobody(turns: int) -> None:
    """In the launch that waits, and in later ones."""
    mine = shared([torch.zeros(1, 64), torch.ones(1, 64)], 1, told=turns)
    mine.turns.fill_(turns)
    residual = torch.zeros(1, 64)
    thread = add_beside(mine, residual)
    assert thread.is_alive(), "it has not waited"
    release(mine, 1)
    thread.join(10.0)
    assert not thread.is_alive()
    for _ in range(3):
        add_parts_triton(residual, mine, 1)

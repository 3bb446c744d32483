"""Sums of parts that a peer copies here: the kernel waits for the copy, and adds as `peer_sum`."""

from __future__ import annotations

import threading

import pytest
import torch

from engine_service.kernels.jit import INTERPRETED
from engine_service.kernels.norm import rms_norm_ref
from engine_service.kernels.peer_sum import add_parts_ref
from engine_service.kernels.pushed_sum import RELEASED, Pushed, add_pushed_triton
from engine_service.pushes import LEAST_ROWS, NUM_CHUNKS, split

device = "cuda" if torch.cuda.is_available() else "cpu"
NUMBER = 7


def pushed(own: torch.Tensor, theirs: torch.Tensor, told: int = NUMBER) -> Pushed:
    line = torch.tensor([told], dtype=torch.int32, device=device)
    return Pushed(own.to(device), theirs.to(device), line, NUMBER)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (3, 1000), (520, 96)])
def test_both_ranks_get_the_same_sum_and_norm(
    rows: int, width: int, dtype: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    residual, one, other = (torch.randn(rows, width).to(dtype) for _ in range(3))
    weight = torch.randn(width).to(dtype)
    sums, norms = [], []
    for parts in ((one, other), (other, one)):
        own = residual.to(device, copy=True)
        normed = torch.full_like(own, torch.nan)
        add_pushed_triton(own, pushed(*parts), (weight.to(device), 1e-6), normed)
        sums.append(own.cpu())
        norms.append(normed.cpu())
    assert torch.equal(*sums)
    assert torch.equal(*norms)
    add_parts_ref(residual, (one, other))
    # Triton's interpreter cuts bfloat16 off where a device rounds it.
    close = {"rtol": 2**-6 if dtype.itemsize == 2 else 1e-5, "atol": 1e-5}
    torch.testing.assert_close(sums[0], residual, **close)
    torch.testing.assert_close(norms[0], rms_norm_ref(sums[0], weight, 1e-6), **close)


def test_a_sum_that_nobody_norms() -> None:
    own, theirs = torch.randn(3, 96), torch.randn(3, 96)
    residual = torch.zeros(3, 96, device=device)
    add_pushed_triton(residual, pushed(own, theirs))
    assert torch.equal(residual.cpu(), own + theirs)


@pytest.mark.skipif(not INTERPRETED, reason="a device's memory is written by a peer")
@pytest.mark.parametrize("last", [NUMBER, RELEASED])
def test_it_waits_until_the_copy_is_told_or_nobody_waits_any_more(last: int) -> None:
    mine = pushed(torch.ones(1, 64), torch.zeros(1, 64), told=NUMBER - 1)
    residual = torch.zeros(1, 64)
    thread = threading.Thread(target=add_pushed_triton, args=(residual, mine), daemon=True)
    thread.start()
    thread.join(0.2)
    assert thread.is_alive(), "it has not waited"
    mine.theirs_TE.fill_(3.0)
    mine.told.fill_(last)
    thread.join(10.0)
    assert not thread.is_alive()
    assert torch.equal(residual, torch.full((1, 64), 4.0))


@pytest.mark.parametrize("extra", [0, 1, 127, 128, 129, 1000, 4096, 12_345])
def test_every_row_is_in_one_chunk_and_all_chunks_have_some(extra: int) -> None:
    chunks = split(LEAST_ROWS + extra)
    assert len(chunks) == NUM_CHUNKS
    assert [row for rows in chunks for row in range(rows.start, rows.stop)] == list(
        range(LEAST_ROWS + extra)
    )
    assert all(rows.stop > rows.start for rows in chunks)

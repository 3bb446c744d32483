"""Sums in rounds: the kernel of one rank, whose peers the test plays, and ranks that all run."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial

import pytest
import torch

from engine_service.kernels.peer_sum import add_parts_triton
from engine_service.kernels.rounds_sum import add_parts_rounds_triton
from tests.kernels.test_peer_sum import LATER, device, draw, interpreted, shared

few = partial(add_parts_rounds_triton, most_sms=1)
"""Two programs, each of two rows a round."""


def test_a_turn_for_the_parts_and_one_for_each_round() -> None:
    """Then other kernels count on. The last share is shorter, and counts as many."""
    mine = shared([torch.ones(26, 64)] * 3, 2)
    residual = torch.zeros(26, 64, device=device)
    turns = 0
    for add, more in ((few, 1 + 3), (add_parts_triton, 1), (few, 4)):
        add(residual, mine, 2)
        turns += more
        for told in (mine.turns, mine.signals[0][2], mine.signals[1][2]):
            assert told[:2].tolist() == [turns] * 2
    for program in (27, 255):
        assert mine.turns[program] == 0
        assert mine.signals[0][2, program] == LATER, "one that was not launched told"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("num_ranks", "rows", "width"), [(3, 7, 1000), (4, 50, 64), (3, 1, 64)])
def test_own_rows_are_what_reading_all_parts_whole_gives(
    num_ranks: int, rows: int, width: int, dtype: torch.dtype, seed: int
) -> None:
    """On all ranks, and in the norm; others' rows are what stands where they write."""
    residual, parts, norm = draw(num_ranks, rows, width, dtype, seed)
    want = residual.to(device, copy=True)
    want_normed = add_parts_triton(want, shared(parts, 0), 0, norm)
    assert want_normed is not None
    share = -(-rows // num_ranks)
    for rank in range(num_ranks):
        own, total = slice(rank * share, (rank + 1) * share), residual.to(device, copy=True)
        mine, normed = shared([part.clone() for part in parts], rank), torch.zeros_like(total)
        assert few(total, mine, rank, norm, normed_TE=normed) is normed
        assert torch.equal(total[own], want[own])
        assert torch.equal(normed[own], want_normed[own])
        taken, there = total.clone(), parts[rank].to(device)
        taken[own] = there[own]
        assert torch.equal(taken, there), "others' rows were not taken as they are"
        for peer, part in enumerate(mine.parts):
            if peer != rank:
                assert torch.equal(part[own], want[own]), "a rank was not given the sum"


@interpreted
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_ranks_that_run_beside_each_other_add_alike(num_ranks: int, seed: int) -> None:
    """All kernels in turn, one rank late, counts that go over their end; control: ranks that do not
    wait add what is not there."""
    command = [sys.executable, "-m", "tests.kernels.ranks_adding", str(num_ranks), str(seed)]
    done = subprocess.run(
        command,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300.0,
        check=False,
    )
    wrong, unwaited, failed = map(int, done.stdout.split())
    assert failed == 0, done.stderr[-3000:]
    assert wrong == 0
    assert unwaited > 0

"""Several ranks, each a process, sum over memory that they share: all kernels in turn.

    TRITON_INTERPRET=1 python -m tests.kernels.ranks_adding RANKS SEED

Prints a line: how many sums were wrong, how many of those for which nobody waited, and how many
ranks failed or hung. Each interprets its kernels' programs one after the other, so that signals
decide who goes on.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import sys
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.synchronize import Barrier

import torch

from engine_service.kernels.peer_sum import (
    MAX_BLOCKS,
    Parts,
    add_parts_ref,
    add_parts_triton,
    release,
)
from engine_service.kernels.rounds_sum import add_parts_rounds_triton
from engine_service.kernels.split_sum import add_parts_split_triton

WIDTH, MOST, TURNS, EPS = 72, 90, 12, 1e-6
LIMIT_S = 200.0
FEW = partial(add_parts_rounds_triton, most_sms=1)
"""Two programs, so that some rows make many rounds."""
KINDS: tuple[Callable[..., torch.Tensor | None], ...] = (
    FEW,
    add_parts_triton,
    add_parts_rounds_triton,
    add_parts_split_triton,
)


def is_wrong(rank: int, sites: list[Parts], turn: int, draw: random.Random, late_s: float) -> bool:
    """Of one sum; all ranks draw the same."""
    size, rows = len(sites[0].parts), draw.choice([1, 3, 17, draw.randint(1, MOST), MOST])
    made = torch.Generator().manual_seed(draw.randrange(1 << 30))
    residual, *parts = (torch.randn(rows, WIDTH, generator=made) for _ in range(size + 1))
    weight, own = torch.rand(WIDTH, generator=made), residual.clone()
    shared = sites[turn % 2]
    if draw.randrange(size) == rank:
        time.sleep(late_s)
    shared.parts[rank][:rows] = parts[rank]
    mine = shared._replace(parts=tuple(part[:rows] for part in shared.parts))
    normed = KINDS[turn % len(KINDS)](own, mine, rank, (weight, EPS))
    want = add_parts_ref(residual, tuple(parts), (weight, EPS))
    assert normed is not None
    assert want is not None
    return not torch.equal(own, residual) or not torch.allclose(normed, want)


def run(rank: int, sites: list[Parts], seed: int, counts: torch.Tensor, together: Barrier) -> None:
    """One rank; `counts[rank]` becomes what it has found."""
    draw = random.Random(seed)
    for turn in range(TURNS):
        counts[rank, 0] += is_wrong(rank, sites, turn, draw, 0.05)
    for turn in range(TURNS, TURNS + len(KINDS)):
        together.wait()
        release(sites[0], rank)
        together.wait()
        counts[rank, 1] += is_wrong(rank, sites, turn, draw, 1.0)


def main(num_ranks: int, seed: int) -> None:
    """Memory is made first: it lies at the same place in all processes then."""
    size = (num_ranks, MAX_BLOCKS)
    start = random.Random(seed).choice([0, 2**31 - 3])  # counts that go over the end of numbers
    signals = [torch.full(size, start, dtype=torch.int32).share_memory_() for _ in range(num_ranks)]
    lines = torch.tensor([line.data_ptr() for line in signals])
    parts = torch.randn(2, num_ranks, MOST, WIDTH).share_memory_()
    counts = torch.zeros(num_ranks, 2, dtype=torch.int64).share_memory_()
    fork = multiprocessing.get_context("fork")
    together = fork.Barrier(num_ranks)
    ranks = []
    for rank in range(num_ranks):
        turns = torch.full((MAX_BLOCKS,), start, dtype=torch.int32)
        sites = [Parts(tuple(site), tuple(signals), lines, turns) for site in parts]
        held = sites, seed, counts, together
        ranks.append(fork.Process(target=run, args=(rank, *held), daemon=True))
        ranks[-1].start()
    deadline = time.monotonic() + LIMIT_S
    for one in ranks:
        one.join(max(0.0, deadline - time.monotonic()))
        if one.exitcode is None:  # it waits for ever
            one.kill()
            one.join()
    print(*counts.sum(0).tolist(), sum(one.exitcode != 0 for one in ranks), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))

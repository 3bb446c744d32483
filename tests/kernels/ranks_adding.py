"""Several ranks, each a process, sum over memory that they share: all kernels in turn.

    TRITON_INTERPRET=1 python -m tests.kernels.ranks_adding RANKS SEED

Prints a line: how many sums were wrong, how many at least of each kind when nobody waited, and how
many ranks failed or hung. Each interprets its kernels' programs one after the other, so that what
they wait for decides who goes on.
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
from typing import NamedTuple

import torch

from engine_service.kernels.mailed_sum import (
    EMPTY,
    Mail,
    add_mailed_shares_triton,
    add_mailed_triton,
    words_of,
)
from engine_service.kernels.mailed_sum import release as release_mail
from engine_service.kernels.norm import rms_norm_ref
from engine_service.kernels.peer_sum import (
    MAX_BLOCKS,
    Parts,
    add_parts_ref,
    add_parts_triton,
    release,
)
from engine_service.kernels.rounds_sum import add_parts_rounds_triton

WIDTH, MOST, TURNS, EPS = 72, 90, 20, 1e-6
LIMIT_S = 200.0


class Site(NamedTuple):
    """Where ranks sum, as one of them holds it."""

    parts: Parts
    mail: Mail
    rank: int


Norm = tuple[torch.Tensor, float]
Sum = Callable[[torch.Tensor, Site, Norm], torch.Tensor | None]


def reading(add: Callable[..., torch.Tensor | None]) -> Sum:
    """By a kernel that reads the others' parts, of the rows that there are."""

    def summed(residual: torch.Tensor, site: Site, norm: Norm) -> torch.Tensor | None:
        parts = tuple(part[: len(residual)] for part in site.parts.parts)
        return add(residual, site.parts._replace(parts=parts), site.rank, norm)

    return summed


def sending(add: Callable[..., torch.Tensor | None], *, with_norm: bool = True) -> Sum:
    """By one that is sent them."""

    def summed(residual: torch.Tensor, site: Site, norm: Norm) -> torch.Tensor | None:
        part = site.parts.parts[site.rank][: len(residual)]
        if with_norm:
            return add(residual, part, site.mail, site.rank, norm)
        assert add(residual, part, site.mail, site.rank) is None
        return rms_norm_ref(residual, *norm)

    return summed


KINDS: tuple[Sum, ...] = (
    reading(partial(add_parts_rounds_triton, most_sms=1)),  # two programs: some rows, many rounds
    sending(add_mailed_triton, with_norm=False),
    reading(add_parts_triton),
    sending(add_mailed_shares_triton),
    reading(add_parts_rounds_triton),
    sending(add_mailed_triton),
)


def is_wrong(add: Sum, site: Site, draw: random.Random, late_s: float) -> bool:
    """Of one sum; all ranks draw the same."""
    size, rows = len(site.parts.parts), draw.choice([1, 3, 17, draw.randint(1, MOST), MOST])
    made = torch.Generator().manual_seed(draw.randrange(1 << 30))
    residual, *parts = (torch.randn(rows, WIDTH, generator=made) for _ in range(size + 1))
    weight, own = torch.rand(WIDTH, generator=made), residual.clone()
    if draw.randrange(size) == site.rank:
        time.sleep(late_s)
    site.parts.parts[site.rank][:rows] = parts[site.rank]
    normed = add(own, site, (weight, EPS))
    want = add_parts_ref(residual, tuple(parts), (weight, EPS))
    assert normed is not None
    assert want is not None
    return not torch.equal(own, residual) or not torch.allclose(normed, want)


def run(sites: list[Site], seed: int, counts: torch.Tensor, together: Barrier) -> None:
    """One rank; `counts[rank]` becomes what it has found."""
    draw, rank = random.Random(seed), sites[0].rank
    for turn in range(TURNS):  # of one kind and of several behind each other
        counts[rank, 0] += is_wrong(draw.choice(KINDS), sites[turn % 2], draw, 0.05)
    for kind, add in enumerate(KINDS):
        together.wait()
        for site in sites:
            site.mail.boxes[rank].fill_(EMPTY)  # what nobody has waited for may lie there
        release(sites[0].parts, rank)
        release_mail(sites[0].mail)
        together.wait()
        counts[rank, 1 + kind] += is_wrong(add, sites[kind % 2], draw, 1.0)


def main(num_ranks: int, seed: int) -> None:
    """Memory is made first: it lies at the same place in all processes then."""
    size = (num_ranks, MAX_BLOCKS)
    start = random.Random(seed).choice([0, 2**31 - 3])  # counts that go over the end of numbers
    signals = [torch.full(size, start, dtype=torch.int32).share_memory_() for _ in range(num_ranks)]
    lines = torch.tensor([line.data_ptr() for line in signals])
    parts = torch.randn(2, num_ranks, MOST, WIDTH).share_memory_()
    size = (2, num_ranks, num_ranks, MOST, WIDTH)
    boxes = torch.full(size, EMPTY, dtype=words_of(parts.dtype)).share_memory_()
    counts = torch.zeros(num_ranks, 1 + len(KINDS), dtype=torch.int64).share_memory_()
    fork = multiprocessing.get_context("fork")
    together = fork.Barrier(num_ranks)
    ranks = []
    for rank in range(num_ranks):
        turns = torch.full((MAX_BLOCKS,), start, dtype=torch.int32)
        released = torch.zeros(1, dtype=torch.int32)
        sites = [
            Site(Parts(tuple(own), tuple(signals), lines, turns), Mail(tuple(box), released), rank)
            for own, box in zip(parts, boxes, strict=True)
        ]
        held = sites, seed, counts, together
        ranks.append(fork.Process(target=run, args=held, daemon=True))
        ranks[-1].start()
    deadline = time.monotonic() + LIMIT_S
    for one in ranks:
        one.join(max(0.0, deadline - time.monotonic()))
        if one.exitcode is None:  # it waits for ever
            one.kill()
            one.join()
    wrong, *unwaited = counts.sum(0).tolist()
    print(wrong, min(unwaited), sum(one.exitcode != 0 for one in ranks), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))

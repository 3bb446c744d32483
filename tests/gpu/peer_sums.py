"""Several ranks sum parts of all sizes: sent, whole or in shares, read, whole or in rounds, and in
chunks, copied or added beside what makes the next.

    python -m tests.gpu.peer_sums RANKS

Prints a line: how many sums were wrong, how many of those where the ranks did not wait, and whether
rows were wrong that were not taken as they come (only three ranks or more have such).
"""

from __future__ import annotations

import os
import random
import socket
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as processes

from engine_service.distributed import Group, meet, open_store
from engine_service.kernels.norm import rms_norm_ref
from engine_service.kernels.peer_sum import add_parts_ref
from engine_service.peers import LEAST_INPUTS, NUM_SITES, PeerSums
from engine_service.place import Place
from engine_service.pushes import LEAST_ROWS, MakeRows

WIDTH, MOST, TURNS = 2560, 8192, 180
EPS = 1e-6
FEW = (1, 3, 16, 17, 64, 129, 300)


def copied(part: torch.Tensor) -> MakeRows:
    """As a product that makes this part."""

    def make(rows: slice, room: torch.Tensor | None) -> torch.Tensor:
        assert room is not None
        return room.copy_(part[rows])

    return make


def sum_of(
    peers: PeerSums,
    site: int,
    residual: torch.Tensor,
    part: torch.Tensor,
    inputs: int,
    in_pieces: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(residual + all parts, the norm of it)."""
    weight = torch.linspace(0.5, 2.0, WIDTH, dtype=part.dtype, device=part.device)
    how = {"inputs": inputs, "in_pieces": in_pieces}
    normed, pieces = peers.add_sum(site, residual, copied(part), (weight, EPS), **how)
    if normed is None:
        # Few rows have it inside of the product that reads them.
        return residual, rms_norm_ref(residual, weight, EPS)
    if not pieces:
        return residual, normed
    read = torch.empty_like(residual), torch.empty_like(normed)
    for piece in pieces:
        with piece.taken():
            for to, of in zip(read, (residual, normed), strict=True):
                to[piece.rows] = of[piece.rows]
    return read


def count_wrong(group: Group, device: torch.device, turns: int) -> int:
    """Of sums of many and of few rows in turn, with one rank late."""
    assert group.peers is not None
    draw, wrong = random.Random(5), 0
    for turn in range(turns):
        rows = draw.choice([*FEW, 1023, LEAST_ROWS, 4609, MOST, draw.randint(1, MOST)])
        torch.manual_seed(turn)
        residual, *parts = (
            torch.randn(rows, WIDTH, device=device).to(torch.bfloat16)
            for _ in range(group.size + 1)
        )
        if group.rank == turn % group.size:
            torch.cuda._sleep(3_000_000)
        site = turn % NUM_SITES
        given = residual.clone(), parts[group.rank], LEAST_INPUTS * (turn % 4 > 0), turn % 4 == 3
        total, normed = sum_of(group.peers, site, *given)
        weight = torch.linspace(0.5, 2.0, WIDTH, dtype=torch.bfloat16, device=device)
        want = add_parts_ref(residual, tuple(parts), (weight, EPS))
        assert want is not None
        wrong += not torch.equal(total, residual)
        # Programs add squares in another order than the reference.
        wrong += not torch.allclose(normed, want, rtol=2**-6, atol=0.0)
        if turn % 3 == 0:
            dist.barrier(group=group._devices)
    return wrong


def count_wrong_chains(group: Group, device: torch.device) -> int:
    """Of eight sums behind each other with nothing between, on both sites in turn."""
    peers, wrong = group.peers, 0
    assert peers is not None
    for rows in FEW:
        torch.manual_seed(rows)
        residual, *parts = (
            torch.randn(rows, WIDTH, device=device).to(torch.bfloat16)
            for _ in range(1 + NUM_SITES * group.size)
        )
        by_site, own = (parts[: group.size], parts[group.size :]), residual.clone()
        for site, of_all in enumerate(by_site):
            peers.sites[site].parts[group.rank][:rows] = of_all[group.rank]
        for turn in range(8):
            peers.add(turn % NUM_SITES, own)
            add_parts_ref(residual, tuple(by_site[turn % NUM_SITES]))
        wrong += not torch.equal(own, residual)
    return wrong


def misses_pieces(group: Group, device: torch.device) -> bool:
    """Control: whether something is not there yet where a sum's rows are not taken as they come."""
    assert group.peers is not None
    parts = torch.ones(MOST, WIDTH, dtype=torch.bfloat16, device=device)
    total = torch.zeros_like(parts)
    if group.rank:
        torch.cuda._sleep(300_000_000)
    how = {"inputs": LEAST_INPUTS, "in_pieces": True}
    _, pieces = group.peers.add_sum(0, total, copied(parts), None, **how)
    early = total.clone()
    for piece in pieces:
        with piece.taken():
            assert bool((total[piece.rows] == group.size).all())
    return bool((early != group.size).any())


@torch.inference_mode()
def run(rank: int, num_ranks: int, place: tuple[str, int]) -> None:
    """One rank; rank 0 prints."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    group = meet(Place(rank, num_ranks, place), device)
    group = group.with_peers(MOST, WIDTH, torch.bfloat16, device)
    wrong = group.all_of(count_wrong(group, device, TURNS) + count_wrong_chains(group, device))
    misses = misses_pieces(group, device)
    assert group.peers is not None
    unwaited = [0, 0, 0, 0]
    for index, rows in enumerate((2, 64, LEAST_ROWS - 1, MOST)):
        # What peers tell takes the place of the release.
        group.peers.release()
        group.await_all(60.0)
        parts = torch.full((rows, WIDTH), rank + 1.0, dtype=torch.bfloat16, device=device)
        if rank:
            torch.cuda._sleep(300_000_000)
        given = torch.zeros_like(parts), parts, LEAST_INPUTS
        total, _ = sum_of(group.peers, index % NUM_SITES, *given)
        unwaited[index] = int((total != num_ranks * (num_ranks + 1) / 2).any())
        group.await_all(60.0)
    told = [max(of) for of in zip(*group.all_of(unwaited), strict=True)]
    missed = group.all_of(misses)
    if not rank:
        print(sum(wrong), sum(told), int(any(missed)), flush=True)
    group.await_all(60.0)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    size = int(sys.argv[1])
    _server, _store, port = open_store(socket.create_server(("127.0.0.1", 0)))
    processes.spawn(run, args=(size, ("127.0.0.1", port)), nprocs=size)

"""Two ranks sum parts that they push to each other, and ones that they read from each other.

Prints a line: how many sums were wrong, and how many where the ranks did not wait.
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
from engine_service.place import Place
from engine_service.pushes import LEAST_ROWS
from tests.gpu.peer_sums import MOST, WIDTH, sum_of

TURNS = 60


def count_wrong(group: Group, device: torch.device, turns: int) -> int:
    """Of sums of many and of few rows in turn, at two sites, with one rank late."""
    assert group.peers is not None
    draw, wrong = random.Random(5), 0
    for turn in range(turns):
        rows = (draw.randint(LEAST_ROWS, MOST), draw.choice([1, 128, LEAST_ROWS, MOST]))
        for site, num_rows in enumerate(rows):
            torch.manual_seed(100 * turn + site)
            residual, one, other = (
                torch.randn(num_rows, WIDTH, device=device).to(torch.bfloat16) for _ in range(3)
            )
            part = other if group.rank else one
            if group.rank == turn % 2:
                torch.cuda._sleep(3_000_000)
            got = sum_of(group.peers, site, residual.clone(), part, True)
            want = (residual.float() + (one.float() + other.float())).to(torch.bfloat16)
            wrong += not torch.equal(got[0], want)
            # At the other site: what is read is made by the kernel that other tests cover.
            read = sum_of(group.peers, 1 - site, residual.clone(), part, False)
            wrong += not all(torch.equal(*pair) for pair in zip(got, read, strict=True))
            dist.barrier(group=group._devices)
    return wrong


@torch.inference_mode()
def run(rank: int, place: tuple[str, int]) -> None:
    """One rank; rank 0 prints."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    group = meet(Place(rank, 2, place), device).with_peers(MOST, WIDTH, torch.bfloat16, device)
    wrong = group.all_of(count_wrong(group, device, TURNS))
    assert group.peers is not None
    group.peers.release()
    group.await_all(60.0)
    parts = torch.full((MOST, WIDTH), rank + 1.0, dtype=torch.bfloat16, device=device)
    if rank:
        torch.cuda._sleep(300_000_000)
    total, _ = sum_of(group.peers, 0, torch.zeros_like(parts), parts, True)
    unwaited = group.all_of(int((total != 3.0).any()))
    if not rank:
        print(sum(wrong), sum(unwaited), flush=True)
    group.await_all(60.0)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    _server, _store, port = open_store(socket.create_server(("127.0.0.1", 0)))
    processes.spawn(run, args=(("127.0.0.1", port),), nprocs=2)

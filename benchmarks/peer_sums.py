"""What a sum over the ranks of one host costs, with the norm behind it: NCCL's all-reduce and a
kernel, a sum over peer memory and a kernel, and both in one launch.

    python -m benchmarks.peer_sums [--gpus 2] [--width 4096] [--rows 1,16,128,256,2048,8192]

Microseconds of rank 0 where they stand, in a captured graph of many, medians over rounds in which
all take turns. Bytes are what a rank reads from another, against the time of one launch.
"""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from statistics import median

import torch
import torch.multiprocessing as processes

from engine_service.distributed import Group, Place, meet, open_store
from engine_service.kernels.norm import add_rms_norm, rms_norm
from engine_service.peers import NUM_SITES, PeerSums

_ROUNDS, _SUMS, _REPLAYS = 15, 20, 5
_EPS = 1e-6
Sum = Callable[[int, torch.Tensor, torch.Tensor], object]
"""(site, residual [T, E], weight [E]): what is measured."""


def list_sums(group: Group, peers: PeerSums) -> Mapping[str, Sum]:
    """By name; parts are what the rank's memory holds."""
    own: dict[int, torch.Tensor] = {}

    def library(site: int, residual: torch.Tensor, weight: torch.Tensor) -> object:
        part = own.setdefault(len(residual), torch.randn_like(residual))
        return add_rms_norm(group.sum_(part), residual, weight, _EPS)

    def apart(site: int, residual: torch.Tensor, weight: torch.Tensor) -> object:
        peers.add(site, residual)
        return rms_norm(residual, weight, _EPS)

    def fused(site: int, residual: torch.Tensor, weight: torch.Tensor) -> object:
        return peers.add(site, residual, (weight, _EPS))

    return {"NCCL, norm": library, "peers, norm": apart, "fused": fused}


def capture(one: Sum, residual: torch.Tensor, weight: torch.Tensor) -> torch.cuda.CUDAGraph:
    """A graph of `_SUMS` sums; all ranks must capture it."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        one(0, residual, weight)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for at in range(_SUMS):
            one(at % NUM_SITES, residual, weight)
    return graph


def in_turn(graphs: Sequence[torch.cuda.CUDAGraph]) -> list[float]:
    """Median microseconds of a sum, by graph."""
    times: list[list[float]] = [[] for _ in graphs]
    for _ in range(_ROUNDS):
        for graph, own in zip(graphs, times, strict=True):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            graph.replay()
            begin.record()
            for _ in range(_REPLAYS):
                graph.replay()
            end.record()
            end.synchronize()
            own.append(begin.elapsed_time(end) * 1000 / _REPLAYS / _SUMS)
    return [median(own) for own in times]


@torch.inference_mode()
def measure(rank: int, said: argparse.Namespace, place: tuple[str, int]) -> None:
    """One rank; rank 0 prints."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    group = meet(Place(rank, said.gpus, place), device)
    group = group.with_peers(max(said.rows), said.width, torch.bfloat16, device)
    assert group.peers is not None, "these devices do not read each other's memory"
    weight = torch.ones(said.width, dtype=torch.bfloat16, device=device)
    sums = list_sums(group, group.peers)
    if not rank:
        print("  rows" + "".join(f"{name:>14s}" for name in sums) + "   MB from a peer   GB/s")
    for num_rows in said.rows:
        residual = torch.randn(num_rows, said.width, dtype=torch.bfloat16, device=device)
        if group.peers.room(0, residual) is None:
            continue
        graphs = [capture(one, residual, weight) for one in sums.values()]
        times = in_turn(graphs)
        del graphs
        if not rank:
            size = residual.numel() * residual.itemsize / 1e6
            told = "".join(f"{time:14.2f}" for time in times)
            print(f"{num_rows:6d}{told}{size:17.2f}{1000 * size / times[-1]:7.0f}", flush=True)
    group.await_all(60.0)
    # A communicator that a graph held cannot be left in order.
    os._exit(0)


def main(argv: Sequence[str] | None = None) -> None:
    """Prints one line a number of rows."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peer_sums")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--rows", default="1,16,128,256,2048,8192")
    said = parser.parse_args(argv)
    said.rows = [int(word) for word in said.rows.split(",")]
    if torch.cuda.device_count() < said.gpus:
        parser.exit(2, f"benchmarks.peer_sums needs {said.gpus} CUDA devices\n")
    store, port = open_store(socket.create_server(("127.0.0.1", 0)))
    processes.spawn(measure, args=(said, ("127.0.0.1", port)), nprocs=said.gpus)


if __name__ == "__main__":
    main()

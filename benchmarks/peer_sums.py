"""What a sum over the ranks of one host costs, with the norm behind it: NCCL's all-reduce and a
kernel, and both in one launch, of parts that are sent (whole, also without the norm, or each to the
rank that adds it) or read (whole, or in rounds by the rank that adds them).

    python -m benchmarks.peer_sums [--gpus 2] [--width 4096] [--rows 1,16,128,256,2048,8192]
    python -m benchmarks.peer_sums --inputs 2048,6144 --rows 4096,8192

Microseconds of rank 0 where they stand, in a captured graph of many, medians over rounds in which
all take turns; 0 where parts are too many to be sent. Bytes are those of a part, against the time
of the last column.

With `--inputs`: the product of so many inputs in front of it too, alone, as a whole with the sum
behind it, and in chunks that are copied (two ranks) or added beside it. Not captured: as prompts
run.
"""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median

import torch
import torch.multiprocessing as processes

from engine_service.distributed import Group, meet, open_store
from engine_service.kernels.mailed_sum import add_mailed_shares_triton, add_mailed_triton
from engine_service.kernels.norm import add_rms_norm
from engine_service.kernels.peer_sum import add_parts_triton
from engine_service.kernels.rounds_sum import add_parts_rounds_triton
from engine_service.peers import LEAST_INPUTS, NUM_SITES, PeerSums
from engine_service.place import Place
from engine_service.pushes import MakeRows

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

    def whole(site: int, residual: torch.Tensor, weight: torch.Tensor) -> object:
        return add_parts_triton(residual, peers.sites[site], group.rank, (weight, _EPS))

    def rounds(site: int, residual: torch.Tensor, weight: torch.Tensor) -> object:
        return add_parts_rounds_triton(residual, peers.sites[site], group.rank, (weight, _EPS))

    def mailed(
        add: Callable[..., object],
        norm: bool,
        site: int,
        residual: torch.Tensor,
        weight: torch.Tensor,
    ) -> object:
        part, mail = peers.sites[site].parts[group.rank][: len(residual)], peers.mails[site]
        if len(residual) > mail.boxes[0].shape[1]:
            return None
        return add(residual, part, mail, group.rank, (weight, _EPS) if norm else None)

    return {
        "NCCL, norm": library,
        "sent, no norm": partial(mailed, add_mailed_triton, False),
        "sent": partial(mailed, add_mailed_triton, True),
        "sent in shares": partial(mailed, add_mailed_shares_triton, True),
        "read": whole,
        "read in rounds": rounds,
    }


def capture(one: Sum, residual: torch.Tensor, weight: torch.Tensor) -> torch.cuda.CUDAGraph:
    """A graph of `_SUMS` sums; all ranks must capture it."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for site in range(NUM_SITES):  # in turn, as in the graph
            one(site, residual, weight)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for at in range(_SUMS):
            one(at % NUM_SITES, residual, weight)
    return graph


def in_turn(runs: Sequence[Callable[[], object]]) -> list[float]:
    """Median microseconds of a sum, by what runs `_SUMS` of them."""
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(_ROUNDS):
        for run, own in zip(runs, times, strict=True):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            run()
            begin.record()
            for _ in range(_REPLAYS):
                run()
            end.record()
            end.synchronize()
            own.append(begin.elapsed_time(end) * 1000 / _REPLAYS / _SUMS)
    return [median(own) for own in times]


def measure_products(
    rank: int, peers: PeerSums, num_inputs: int, norm: torch.Tensor, all_rows: Sequence[int]
) -> None:
    """Prints a line a number of rows."""
    like = {"dtype": norm.dtype, "device": norm.device}
    weight = torch.randn(len(norm), num_inputs, **like) * 0.02
    if not rank:
        print("inputs  rows       alone  whole, sum  in chunks")
    for num_rows in all_rows:
        residual = torch.randn(num_rows, len(norm), **like)
        x, y = torch.randn(num_rows, num_inputs, **like), torch.empty_like(residual)

        def make(rows: slice, room: torch.Tensor | None, x: torch.Tensor = x) -> torch.Tensor:
            return torch.mm(x[rows], weight.t(), out=room)

        def alone(make: MakeRows = make, y: torch.Tensor = y) -> None:
            for _ in range(_SUMS):
                make(slice(None), y)

        def summed(inputs: int, make: MakeRows = make, residual: torch.Tensor = residual) -> None:
            for at in range(_SUMS):
                peers.add_sum(at % NUM_SITES, residual, make, (norm, _EPS), inputs=inputs)

        times = in_turn([alone, partial(summed, 0), partial(summed, LEAST_INPUTS)])
        if not rank:
            told = "".join(f"{time:12.1f}" for time in times)
            print(f"{num_inputs:6d}{num_rows:6d}{told}", flush=True)


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
    if said.inputs:
        for num_inputs in said.inputs:
            measure_products(rank, group.peers, num_inputs, weight, said.rows)
        said.rows = []
    elif not rank:
        print("  rows" + "".join(f"{name:>16s}" for name in sums) + "     MB of a part   GB/s")
    for num_rows in said.rows:
        residual = torch.randn(num_rows, said.width, dtype=torch.bfloat16, device=device)
        if not group.peers.fit(residual):
            continue
        graphs = [capture(one, residual, weight) for one in sums.values()]
        times = in_turn([graph.replay for graph in graphs])
        del graphs
        if not rank:
            size = residual.numel() * residual.itemsize / 1e6
            told = "".join(f"{time:16.2f}" for time in times)
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
    parser.add_argument("--inputs", default="")
    said = parser.parse_args(argv)
    said.rows = [int(word) for word in said.rows.split(",")]
    said.inputs = [int(word) for word in said.inputs.split(",") if word]
    if torch.cuda.device_count() < said.gpus:
        parser.exit(2, f"benchmarks.peer_sums needs {said.gpus} CUDA devices\n")
    _server, _store, port = open_store(socket.create_server(("127.0.0.1", 0)))
    processes.spawn(measure, args=(said, ("127.0.0.1", port)), nprocs=said.gpus)


if __name__ == "__main__":
    main()

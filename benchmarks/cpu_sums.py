"""What a sum over ranks on CPUs costs: gloo's, round a ring, and by way of the first rank.

    python -m benchmarks.cpu_sums [--ranks 2,4] [--bytes 768,3072,49152,262144,1048576]

A line for each: microseconds a sum, and of the processor for each rank, medians over rounds in
which both take turns.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import tempfile
import time
from collections.abc import Callable, Sequence
from statistics import median

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]

from engine_service import first_rank

FORK = multiprocessing.get_context("fork")
_ROUNDS, _SUMS = 9, 60
_HEAD = """\
             gloo            by way of the first
ranks bytes  us  processor   us  processor"""


def processor_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def timed(add: Callable[[torch.Tensor], object], x: torch.Tensor) -> tuple[float, float]:
    """Microseconds a sum: on the clock, and of this process."""
    dist.barrier()
    began, used = time.perf_counter(), processor_s()
    for _ in range(_SUMS):
        add(x)
    ended, done = time.perf_counter(), processor_s()
    return (ended - began) / _SUMS * 1e6, (done - used) / _SUMS * 1e6


def work(rank: int, size: int, sizes: Sequence[int], folder: str) -> None:
    """One rank; the first one prints what all of them found."""
    torch.set_num_threads(1)
    store = FileStore(f"{folder}/{size}", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)

    def by_way_of_first(x: torch.Tensor) -> None:
        place = {"rank": rank, "size": size}
        first_rank.give_all(x, x, lambda parts: sum(parts[1:], start=parts[0]), **place, group=None)

    for num_bytes in sizes:
        x = torch.zeros(num_bytes // 4)
        rounds = [(*timed(dist.all_reduce, x), *timed(by_way_of_first, x)) for _ in range(_ROUNDS)]
        found = torch.tensor([median(column) for column in zip(*rounds, strict=True)])
        dist.all_reduce(found)
        if rank == 0:
            print(size, num_bytes, *(round(value / size) for value in found.tolist()), flush=True)
    dist.barrier()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--bytes", default="768,3072,49152,262144,1048576")
    options = parser.parse_args()
    sizes = [int(word) for word in options.bytes.split(",")]
    print(_HEAD, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for size in map(int, options.ranks.split(",")):
            ranks = [
                FORK.Process(target=work, args=(at, size, sizes, folder)) for at in range(size)
            ]
            for rank in ranks:
                rank.start()
            for rank in ranks:
                rank.join()


if __name__ == "__main__":
    main()

"""What it is worth to choose the library's kernels: each product of a layer by the kernel that
cuBLAS takes, by the one that `choose_cut` names, and by `small_linear` where that has one.

    python -m benchmarks.library_products [--shape qwen3-8b] [--rows 32,64,128,256,1024,8192]

Medians over rounds in which all take turns, on a card that is warm: a cold one draws less power and
runs large tiles faster. Random weights, bfloat16, as many of each as the caches cannot hold.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

import torch

from benchmarks.decode_layer import SHAPES, Shape
from engine_service.kernels.library_linear import library_linear
from engine_service.kernels.small_linear import MAX_ROWS, small_linear_triton
from tidemill.bench.roofline import ceilings_of

_CACHE_BYTES = 150 << 20
_ROUNDS, _ROUND_US = 15, 2000.0
_SETTLE_US, _ALONE_US = 1.5e5, 3e5


def list_products(shape: Shape) -> dict[str, tuple[int, int, bool]]:
    """Outputs, inputs, and whether it adds to what is there."""
    heads, keys = shape.heads * shape.head_dim, 2 * shape.kv_heads * shape.head_dim
    return {
        "qkv": (heads + keys, shape.hidden, False),
        "out": (shape.hidden, heads, True),
        "gate, up": (2 * shape.inner, shape.hidden, False),
        "down": (shape.hidden, shape.inner, True),
    }


def capture(run: Callable[[int], object], count: int) -> torch.cuda.CUDAGraph:
    """One graph of `count` calls."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for at in range(count):
            run(at)
    return graph


def in_turn(graphs: Sequence[torch.cuda.CUDAGraph], count: int, guess_us: float) -> list[float]:
    """Median microseconds of a call, by graph."""
    replays = max(1, round(_ROUND_US / (guess_us * count)))
    times: list[list[float]] = [[] for _ in graphs]
    for _ in range(_ROUNDS):
        for graph, own in zip(graphs, times, strict=True):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            graph.replay()
            begin.record()
            for _ in range(replays):
                graph.replay()
            end.record()
            end.synchronize()
            own.append(begin.elapsed_time(end) * 1000 / replays / count)
    return [median(own) for own in times]


def alone(graphs: Sequence[torch.cuda.CUDAGraph], count: int, guess_us: float) -> list[float]:
    """Mean microseconds of a call, by graph, each behind itself until the clock has settled: of
    long products, which draw all the power there is, those that need less run at a higher one."""
    settling, replays = (
        max(1, round(length_us / (guess_us * count))) for length_us in (_SETTLE_US, _ALONE_US)
    )
    times = []
    for graph in graphs:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(settling):
            graph.replay()
        begin.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / replays / count)
    return times


def measure(num_rows: int, out_size: int, in_size: int, adds: bool) -> list[float]:
    """Microseconds of the library's choice, of `choose_cut`'s, and of our own kernel if there is
    one."""
    device, bytes_each = torch.device("cuda"), 2 * out_size * in_size
    weights = [
        torch.randn(out_size, in_size, dtype=torch.bfloat16, device=device) * 0.02
        for _ in range(max(2, -(-_CACHE_BYTES // bytes_each)))
    ]
    x = torch.randn(num_rows, in_size, dtype=torch.bfloat16, device=device)
    out = torch.zeros(num_rows, out_size, dtype=torch.bfloat16, device=device)

    def library(at: int) -> object:
        weight = weights[at % len(weights)].t()
        return out.addmm_(x, weight) if adds else torch.mm(x, weight, out=out)

    def by(product: Callable[..., object], at: int) -> object:
        weight = weights[at % len(weights)]
        return product(x, weight, **({"residual": out} if adds else {"out": out}))

    runs = [library, partial(by, library_linear)]
    if num_rows <= MAX_ROWS:
        runs.append(partial(by, small_linear_triton))
    graphs = [capture(run, len(weights)) for run in runs]
    guess_us = max(bytes_each / 4e6, 2 * num_rows * out_size * in_size / 7e8)
    return in_turn(graphs, len(weights), guess_us)


@torch.inference_mode()
def main(argv: Sequence[str] | None = None) -> None:
    """Prints one line a product and number of rows, and sums."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.library_products")
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--rows", default="32,64,128,256,1024,8192")
    said = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.exit(2, "benchmarks.library_products needs a CUDA device\n")
    ceilings = ceilings_of("cuda")
    assert ceilings is not None, "a CUDA device has ceilings"
    print("  rows product   bound us   library   chosen   gain     ours")
    for num_rows in map(int, said.rows.split(",")):
        sums = [0.0, 0.0]
        for name, (out_size, in_size, adds) in list_products(SHAPES[said.shape]).items():
            size = 2 * out_size * in_size
            bound = 1e6 * max(size / ceilings.bytes_per_s, num_rows * size / ceilings.flop_per_s)
            library, chosen, *ours = measure(num_rows, out_size, in_size, adds)
            sums = [sums[0] + library, sums[1] + chosen]
            own = f"{ours[0]:8.2f}" if ours else ""
            print(
                f"{num_rows:6d} {name:9s} {bound:8.2f} {library:9.2f} {chosen:8.2f}"
                f" {library / chosen:6.3f} {own}",
                flush=True,
            )
        library, chosen = sums
        print(
            f"{num_rows:6d} layer              {library:9.2f} {chosen:8.2f} {library / chosen:6.3f}"
        )


if __name__ == "__main__":
    main()

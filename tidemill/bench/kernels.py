"""Every kernel of the engine against PyTorch eager and against what the device can do.

Eager is the formula as transformers writes it, operator by operator. A kernel is captured many
times in a row into a CUDA graph over inputs that together exceed the caches, as a decoding step
would run it; the time is the median over replays. It does not know what the kernels are for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

from tidemill.bench.bounds import OneOrMore
from tidemill.bench.roofline import Ceilings, ceilings_as_figures, ceilings_of
from tidemill.runtime.errors import InvalidRequest, Unsupported

if TYPE_CHECKING:
    from tidemill.bench.kernel_cases import Case

_REPLAYS = 9
_GRAPH_MS = 2.0
"""Length of a replay: what a launch of the graph takes is then below 1 %."""
_MAX_CALLS = 64
_CACHES_BYTES = 160 << 20
"""Inputs in turn hold at least this much: three times an H200's L2."""
_MAX_COPIES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelsOptions:
    """Flags of `tidemill bench kernels`."""

    only: str = ""
    """Measure the kernels whose names contain this."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Number format."""
    page_size: OneOrMore = 64
    """Tokens per KV page."""


def run(options: KernelsOptions) -> dict[str, Any]:
    """One row per kernel and size. Raises Unsupported without a CUDA device or without Triton,
    and InvalidRequest where `only` names no kernel."""
    import torch

    if not torch.cuda.is_available():
        raise Unsupported("tidemill bench kernels needs a CUDA device")
    from engine_service.kernels.jit import HAS_TRITON, INTERPRETED
    from tidemill.bench import attention_cases, choice_cases, kernel_cases, mixture_cases

    if not HAS_TRITON or INTERPRETED:
        raise Unsupported("tidemill bench kernels needs Triton, and TRITON_INTERPRET unset")
    dtype, device = getattr(torch, options.dtype), torch.device("cuda")
    ceilings = ceilings_of("cuda")
    assert ceilings is not None
    rows = []
    with torch.inference_mode():
        cases: Iterator[Case] = chain(
            kernel_cases.cases(dtype, device, options.page_size),
            attention_cases.cases(dtype, device, options.page_size),
            choice_cases.cases(dtype, device),
            mixture_cases.cases(dtype, device),
        )
        for case in cases:
            if options.only in case.name:
                rows.append(_measure(case, ceilings))
                line = f"{case.name} {case.size}: {rows[-1]['us']:.1f} us"
                print(line, file=sys.stderr, flush=True)
    if not rows:
        raise InvalidRequest(f"no kernel's name contains {options.only!r}", param="only")
    return {"dtype": options.dtype, "ceilings": ceilings_as_figures(ceilings), "kernels": rows}


def _measure(case: Case, ceilings: Ceilings) -> dict[str, Any]:
    ours = time_us(case.ours, case.moved, captured=case.capturable)
    eager = None
    if case.eager is not None:
        eager = time_us(case.eager, case.moved, captured=case.eager_capturable)
    return {"name": case.name, "size": case.size} | rates(
        ours, eager, moved=case.moved, flop=case.flop, ceilings=ceilings
    )


def rates(
    us: float, eager_us: float | None, *, moved: int, flop: int, ceilings: Ceilings
) -> dict[str, Any]:
    """Figures of one kernel: microseconds, how much faster than eager, bytes and operations per
    second, and their shares of the ceilings. 0 bytes or operations are not judged."""
    bandwidth, matrix = moved / us * 1e6, flop / us * 1e6
    return {
        "us": round(us, 2),
        "eager_us": None if eager_us is None else round(eager_us, 2),
        "speedup": None if eager_us is None else round(eager_us / us, 2),
        "gb_per_s": round(bandwidth / 1e9, 1) if moved else None,
        "copy_share": round(bandwidth / ceilings.bytes_per_s, 3) if moved else None,
        "tflop_per_s": round(matrix / 1e12, 1) if flop else None,
        "matrix_share": round(matrix / ceilings.flop_per_s, 3) if flop else None,
    }


def time_us(make: Callable[[], Callable[[], object]], moved: int, *, captured: bool) -> float:
    """Median microseconds of a call. `make` returns a call on inputs of its own."""
    import torch

    copies = min(_MAX_COPIES, -(-_CACHES_BYTES // moved)) if moved else 1
    calls = [make() for _ in range(copies)]
    for call in calls:  # compiles, and chooses the library's algorithms
        call()
    once_ms = min(_elapsed_ms(calls[0]) for _ in range(3))
    count = min(_MAX_CALLS, max(1, round(_GRAPH_MS / once_ms)))

    def turn() -> None:
        for index in range(count):
            calls[index % copies]()

    replay: Callable[[], object] = turn
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            turn()
        replay = graph.replay
    replay()
    return median(_elapsed_ms(replay) for _ in range(_REPLAYS)) * 1e3 / count


def _elapsed_ms(call: Callable[[], object]) -> float:
    import torch

    new_event: Callable[..., torch.cuda.Event] = torch.cuda.Event
    start, stop = new_event(enable_timing=True), new_event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    call()
    stop.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(stop))


def table(result: dict[str, Any]) -> list[tuple[str, str]]:
    """Lines for the terminal."""
    lines = []
    for row in result["kernels"]:
        text = f"{row['us']:10.1f} us"
        if row["speedup"] is not None:
            text += f"  {row['speedup']:5.1f}x eager"
        if row["gb_per_s"] is not None:
            text += f"  {row['gb_per_s']:7.0f} GB/s ({row['copy_share']:.0%} of copy)"
        if row["tflop_per_s"] is not None:
            text += f"  {row['tflop_per_s']:5.0f} TFLOP/s ({row['matrix_share']:.0%})"
        lines.append((f"{row['name']} {row['size']}", text))
    return lines

"""Where the time of a whole request set goes on the device: kernels by name, and what is idle.

    python -m benchmarks.whole_sets --shape qwen3-8b --set b256_1024_128,mixed256

Random weights, bfloat16. Kernels that overlap count once, for the one that began first. Prompts end
with the last kernel of FlashAttention; without it all counts as behind them. The profiler makes a
set 1 to 2 % longer.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from engine_service.config import EngineConfig
from tidemill.bench.engines import open_engine
from tidemill.bench.sets import RequestSet, request_sets
from tidemill.llm import LLM
from tidemill.sampling_params import SamplingParams

_SHOWN, _WIDTH = 14, 90
_NOTABLE_NS = 8000
"""Idle times from here on are told with the kernels around them."""


class Kernel(NamedTuple):
    start_ns: int
    length_ns: int
    name: str


@dataclass(slots=True)
class Share:
    """A part of the time line, in nanoseconds."""

    length: int = 0
    idle: int = 0
    busy: Counter[str] = field(default_factory=Counter)
    """By kernel, what is not hidden behind one that began before."""
    gaps: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By the kernels before and behind, idle times of `_NOTABLE_NS` and more."""


def split_time(kernels: Iterable[Kernel], until: str) -> tuple[Share, Share]:
    """Up to the end of the last kernel with `until` in its name, and behind it."""
    ordered = sorted(kernels)
    ends = [k.start_ns + k.length_ns for k in ordered if until in k.name.lower()]
    border = max(ends, default=ordered[0].start_ns)
    shares = (Share(), Share())
    now, before = ordered[0].start_ns, ""
    for kernel in ordered:
        share = shares[kernel.start_ns >= border]
        idle, end = max(0, kernel.start_ns - now), kernel.start_ns + kernel.length_ns
        share.idle += idle
        if idle >= _NOTABLE_NS:
            share.gaps[before, kernel.name] += idle
        gain = max(0, end - max(now, kernel.start_ns))
        share.busy[kernel.name] += gain
        share.length += idle + gain
        if end > now:
            now, before = end, kernel.name
    return shares


def profile(llm: LLM, requests: RequestSet) -> list[Kernel]:
    """Everything that one run of the set has run on the device."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as recorded:
        run(llm, requests)
    kineto = recorded.profiler
    assert kineto is not None
    assert kineto.kineto_results is not None
    return [
        Kernel(event.start_ns(), event.duration_ns(), event.name())
        for event in kineto.kineto_results.events()
        if event.device_type().name == "CUDA"
    ]


def run(llm: LLM, requests: RequestSet) -> float:
    """Seconds of the whole set."""
    params = [
        SamplingParams(temperature=0.6, max_tokens=length, ignore_eos=True)
        for length in requests.output_lens
    ]
    began = time.perf_counter()
    llm.generate(requests.prompts, params, use_tqdm=False)
    return time.perf_counter() - began


def show(title: str, share: Share) -> None:
    print(f"{title}: {share.length / 1e6:.1f} ms, idle {share.idle / 1e6:.1f}")
    for name, busy in share.busy.most_common(_SHOWN):
        print(f"  {busy / 1e6:9.2f} ms  {name[:_WIDTH]}")
    for (before, behind), idle in share.gaps.most_common(5):
        print(
            f"  {idle / 1e6:9.2f} ms  idle from {before[: _WIDTH // 3]} to {behind[: _WIDTH // 3]}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--set", default="b256_1024_128")
    options = parser.parse_args()
    sets = request_sets(options.set)
    longest = max(requests.longest for requests in sets)
    with open_engine(EngineConfig(dtype="bfloat16"), options.shape, longest=longest) as opened:
        for requests in sets:
            seconds = min(run(opened.llm, requests) for _ in range(3))
            prompts, rest = split_time(profile(opened.llm, requests), "flash")
            print(f"{options.shape} {requests.name}: {seconds:.4f} s unprofiled, best of three")
            show("prompts", prompts)
            show("behind them", rest)


if __name__ == "__main__":
    main()

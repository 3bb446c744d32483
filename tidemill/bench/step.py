"""Where the time of a step goes: the host's phases, and with --profile the device's kernels.

`rows` requests of `context` tokens decode together; the engine is watched from outside. Where steps
overlap, the phases of one turn belong to two steps: the one that is launched and the one whose
decisions are collected. It does not know what a phase does.
"""

from __future__ import annotations

import re
import sys
import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from engine_service.config import EngineConfig
from tidemill.bench.bounds import OneOrMore, ZeroOrMore
from tidemill.bench.engines import open_engine
from tidemill.bench.probe import timed, watch_arrivals
from tidemill.bench.sets import RequestSet, fixed
from tidemill.runtime.errors import InvalidRequest

if TYPE_CHECKING:
    from tidemill.llm import LLM

_SLACK = 8
"""Steps between the last prompt and the first measured step, and behind the last one."""
_COLLECTIVES = re.compile(
    r"nccl|_(add_parts|add_pushed|mailed_sum|mailed_shares|rounds_sum)_kernel"
)
"""Kernels in which ranks wait for each other: NCCL's, and sums over memory of peers."""
_LEAST_TOKEN_BUDGET = 1024
"""The smallest default of --token-budget."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOptions:
    """Flags of `tidemill bench step`, beside those of the engine."""

    shape: str | None = None
    """Model shape with random weights instead of --model."""
    rows: OneOrMore = 32
    """Requests that decode together."""
    context: OneOrMore = 256
    """Prompt tokens of each; those whose prompts are computed first are some tokens ahead."""
    steps: OneOrMore = 64
    """Measured steps."""
    tokens_per_step: OneOrMore = 1
    """Most tokens a step gives a request: the block length of block diffusion."""
    temperature: ZeroOrMore = 0.6
    """Sampling temperature."""
    profile: bool = False
    """Run as many steps again under torch.profiler and group the device's kernels by name."""


def run(options: StepOptions, config: EngineConfig) -> dict[str, Any]:
    """Milliseconds per step by phase: medians over the steps, of each phase and of the whole.

    Raises InvalidRequest when requests end before the last measured step.
    """
    decoded = options.steps * (2 if options.profile else 1) + 2 * _SLACK
    decoded = (decoded + _prefill_steps(options, config)) * options.tokens_per_step
    longest = options.context + decoded
    with open_engine(config, options.shape, longest=longest, max_rows=options.rows) as engine:
        _refuse_fewer_rows(engine.llm.facts.max_rows, options.rows)
        requests = RequestSet("rows", *fixed(options.rows, options.context, decoded))
        requests = requests.within(engine.llm.facts.vocab_size)
        _begin(engine.llm, requests, options.temperature)
        live_tokens = engine.llm.engine.scheduler.live_tokens
        print(f"{options.rows} rows decode", file=sys.stderr, flush=True)
        phases = _time_phases(engine.llm, options.steps)
        kernels = _profile(engine.llm, options.steps) if options.profile else None
        if engine.llm.engine.scheduler.load.running < options.rows:
            raise InvalidRequest(
                "requests ended while they were measured: pass --tokens-per-step the model's "
                "block length",
                param="tokens_per_step",
            )
        return engine.figures() | {
            "rows": options.rows,
            "context": options.context,
            "mean_context": round(live_tokens / options.rows, 1),
            "steps": options.steps,
            "phases_ms": phases,
            "device": kernels,
        }


def _refuse_fewer_rows(max_rows: int, rows: int) -> None:
    if max_rows < rows:
        raise InvalidRequest(
            f"{rows} rows cannot decode together in {max_rows}: leave --max-rows out",
            param="max_rows",
        )


def _prefill_steps(options: StepOptions, config: EngineConfig) -> int:
    """Steps during which some requests decode and others are still in their prompts, at most."""
    budget = max(1, (config.token_budget or _LEAST_TOKEN_BUDGET) - options.rows)
    return -(-options.rows * options.context // budget)


def _begin(llm: LLM, requests: RequestSet, temperature: float) -> None:
    """Submits all and steps until every prompt is computed and decoding has settled."""
    from tidemill.sampling_params import SamplingParams

    for prompt, length in zip(requests.prompts, requests.output_lens, strict=True):
        params = SamplingParams(temperature=temperature, max_tokens=length, ignore_eos=True)
        llm.add_request(prompt, params)
    started: set[int] = set()
    with watch_arrivals(llm.engine) as arrivals:
        while len(started) < len(requests.prompts):
            llm.step()
            for _, output in arrivals.outputs:
                started.update(output.keys)
            arrivals.outputs.clear()
    for _ in range(_SLACK):
        llm.step()


def _time_phases(llm: LLM, steps: int) -> dict[str, float]:
    """Medians over the steps; `deliver` is what the caller's side of a turn takes."""
    scheduler, executor = llm.engine.scheduler, llm.engine.executor
    watched = {
        "schedule": (scheduler, "schedule"),
        "launch": (executor, "launch"),
        "wait": (executor, "collect"),
        "apply": (scheduler, "apply"),
        "emit": (scheduler, "emit"),
    }
    spent: dict[str, list[float]] = {name: [] for name in watched}
    whole: list[float] = []
    with ExitStack() as stack:
        for name, (owner, method) in watched.items():
            stack.enter_context(timed(owner, method, spent[name]))
        for _ in range(steps):
            for seconds in spent.values():
                seconds.append(0.0)
            start = time.perf_counter()
            llm.step()
            whole.append(time.perf_counter() - start)
    rest = [sum_ - sum(parts) for sum_, *parts in zip(whole, *spent.values(), strict=True)]
    found = {**spent, "deliver": rest, "step": whole}
    return {name: round(median(seconds) * 1e3, 4) for name, seconds in found.items()}


def _profile(llm: LLM, steps: int) -> dict[str, Any] | None:
    """Kernel time per step by name; None without a CUDA device.

    The profiler slows the host down, so `profiled_step_ms` is longer than a step. Kernels that
    overlap count in full, each from its own start. Of several ranks it sees rank 0; in collectives
    it waits for the others too.
    """
    import torch

    if not llm.facts.device.startswith("cuda"):
        print("no CUDA device, so no kernels to profile", file=sys.stderr)
        return None
    activities = [torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profiler:
        start = time.perf_counter()
        for _ in range(steps):
            llm.step()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
    total: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    for event in profiler.events():
        if event.device_type.name == "CUDA":
            total[short_name(event.name)] += event.time_range.elapsed_us() / 1e3
            calls[short_name(event.name)] += 1
    ordered = sorted(total, key=lambda name: -total[name])
    return {
        "profiled_step_ms": round(seconds * 1e3 / steps, 4),
        "kernel_ms": round(sum(total.values()) / steps, 4),
        "collective_ms": round(collective_time(total) / steps, 4),
        "kernels": [
            {
                "name": name,
                "ms": round(total[name] / steps, 5),
                "calls": round(calls[name] / steps, 2),
            }
            for name in ordered
        ],
    }


def collective_time(spent: Mapping[str, float]) -> float:
    """The part of the kernels' time that goes by in collectives; keys are short names."""
    return sum(time for name, time in spent.items() if _COLLECTIVES.match(name))


def short_name(kernel: str) -> str:
    """A kernel's name without return type, template arguments and parameters."""
    plain = re.sub(r"^void ", "", kernel)
    return re.split(r"[<(]", plain.replace("(anonymous namespace)::", ""))[0].strip()[:80]


def table(result: dict[str, Any]) -> list[tuple[str, str]]:
    """Lines for the terminal."""
    lines = [(name, f"{value:9.3f} ms") for name, value in result["phases_ms"].items()]
    device = result["device"]
    if device is None:
        return lines
    lines.append(("device", f"{device['kernel_ms']:9.3f} ms of kernels a step"))
    if device["collective_ms"]:
        share = device["collective_ms"] / device["kernel_ms"]
        lines.append(("collectives", f"{device['collective_ms']:9.3f} ms of it, {share:.1%}"))
    for row in device["kernels"][:15]:
        lines.append((f"  {row['ms']:.4f} ms x{row['calls']:g}", row["name"]))
    return lines

"""Throughput of equal requests beside transformers' static-batch `generate` on the same weights.

Both run in this process, alternating, so that they meet the same machine. Prompts are random token
ids, outputs have a fixed length (end-of-sequence is ignored), decoding is greedy.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from engine_service.config import EngineConfig
from tidemill.bench.engines import OpenEngine, open_engine

if TYPE_CHECKING:
    from tidemill.bench.throughput import ThroughputOptions
    from tidemill.llm import LLM

_REPEATS = 5


def compare(options: ThroughputOptions, config: EngineConfig) -> dict[str, Any]:
    """Seconds and tokens per second of every run, medians, and the ratio to the peer.

    Raises RuntimeError when an engine returns another number of tokens than was asked for.
    """
    longest, rows = options.input_len + options.output_len, options.requests
    with open_engine(config, options.shape, longest=longest, max_rows=rows) as engine:
        return _compare(options, engine)


def _compare(options: ThroughputOptions, engine: OpenEngine) -> dict[str, Any]:
    import torch

    torch.set_num_threads(options.threads)
    llm = engine.llm
    prompts = _prompts(options, llm.facts.vocab_size)
    runs: dict[str, Callable[[], int]] = {"tidemill": lambda: _ours(llm, prompts, options)}
    if options.against == "transformers":
        runs["transformers"] = _transformers(options, engine, prompts)
    seconds = _alternate(runs, options)
    tokens = options.requests * options.output_len
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    result: dict[str, Any] = engine.figures() | {
        "options": {name: getattr(options, name) for name in options.__dataclass_fields__}
        | {"temperature": 0.0},
        "seconds": seconds,
        "median_seconds": medians,
        "tokens_per_second": {name: tokens / value for name, value in medians.items()},
    }
    if "transformers" in medians:
        result["ratio_to_peer"] = medians["transformers"] / medians["tidemill"]
    return result


def _prompts(options: ThroughputOptions, vocab_size: int) -> list[list[int]]:
    rng = random.Random(options.seed)
    return [
        [rng.randrange(vocab_size) for _ in range(options.input_len)]
        for _ in range(options.requests)
    ]


def _alternate(
    runs: dict[str, Callable[[], int]], options: ThroughputOptions
) -> dict[str, list[float]]:
    """One warm-up each, then rounds in which every engine runs once."""
    expected = options.requests * options.output_len
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for round_index in range((options.repeats or _REPEATS) + 1):
        for name, run_once in runs.items():
            start = time.perf_counter()
            tokens = run_once()
            if tokens != expected:
                raise RuntimeError(f"{name} returned {tokens} tokens instead of {expected}")
            if round_index:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def _ours(llm: LLM, prompts: list[list[int]], options: ThroughputOptions) -> int:
    from tidemill.sampling_params import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=options.output_len, ignore_eos=True)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return sum(len(output.outputs[0].token_ids) for output in outputs)


def _transformers(
    options: ThroughputOptions, engine: OpenEngine, prompts: list[list[int]]
) -> Callable[[], int]:
    """The peer's run: static batch, greedy, KV cache on, the library's own defaults otherwise."""
    import torch
    from transformers import AutoModelForCausalLM

    from engine_service.worker.checkpoint import fetch_checkpoint

    facts = engine.llm.facts
    folder = fetch_checkpoint(engine.config, lambda *_: None).folder
    dtype = getattr(torch, facts.dtype)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    model.eval().to(facts.device)
    input_ids = torch.tensor(prompts, device=facts.device)
    kwargs = {
        "max_new_tokens": options.output_len,
        "min_new_tokens": options.output_len,
        "do_sample": False,
        "attention_mask": torch.ones_like(input_ids),
    }

    def generate() -> int:
        with torch.inference_mode():
            output = model.generate(input_ids, **kwargs)
        return int(output.numel() - input_ids.numel())

    return generate


def table(result: dict[str, Any]) -> list[tuple[str, str]]:
    """Lines for the terminal."""
    lines = [
        (name, f"{result['median_seconds'][name]:.3f} s  {speed:,.0f} tok/s")
        for name, speed in result["tokens_per_second"].items()
    ]
    if "ratio_to_peer" in result:
        lines.append(("ratio to transformers", f"{result['ratio_to_peer']:.2f}x"))
    return lines

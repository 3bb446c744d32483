"""Offline throughput: a set of equal requests through `tidemill.LLM`, beside a peer.

Prompts are random token ids, outputs have a fixed length (end-of-sequence is ignored), decoding is
greedy. With `against="transformers"` the same weights run through transformers' static-batch
`generate` in the same process, alternating with ours, so that both meet the same machine.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from tidemill.llm import LLM


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputOptions:
    """Flags of `tidemill bench throughput`."""

    model: str = "demo"
    """Built-in model, local folder, or hub id."""
    requests: int = 32
    """Requests that run together."""
    input_len: int = 64
    """Prompt tokens per request."""
    output_len: int = 128
    """Generated tokens per request."""
    repeats: int = 5
    """Timed runs; the median is reported."""
    threads: int = 2
    """Torch threads on CPU."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Number format."""
    load_format: Literal["auto", "safetensors", "dummy"] = "auto"
    """dummy needs only a config.json."""
    against: Literal["none", "transformers"] = "transformers"
    """Peer that runs the same requests in the same process."""
    seed: int = 0
    """Seed of the prompts."""
    json: str | None = None
    """File for the results."""


def run(options: ThroughputOptions) -> dict[str, Any]:
    """Measures and returns figures: seconds and tokens per second of every run, and the ratio."""
    import torch

    from tidemill.llm import LLM

    torch.set_num_threads(options.threads)
    llm = LLM(
        options.model,
        dtype=options.dtype,
        load_format=options.load_format,
        prefix_caching=False,
        max_model_len=options.input_len + options.output_len,
        max_rows=options.requests,
    )
    prompts = _prompts(options, llm.facts.vocab_size)
    runs: dict[str, Callable[[], int]] = {"tidemill": lambda: _ours(llm, prompts, options)}
    if options.against == "transformers":
        runs["transformers"] = _transformers(options, llm, prompts)
    seconds = _alternate(runs, options)
    tokens = options.requests * options.output_len
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    result: dict[str, Any] = {
        "benchmark": "throughput",
        "options": {name: getattr(options, name) for name in options.__dataclass_fields__},
        "torch": torch.__version__,
        "device": llm.facts.device,
        "dtype": llm.facts.dtype,
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
    """One warm-up each, then `repeats` rounds in which every engine runs once."""
    expected = options.requests * options.output_len
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for round_index in range(options.repeats + 1):
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
    options: ThroughputOptions, llm: LLM, prompts: list[list[int]]
) -> Callable[[], int]:
    """The peer's run: static batch, greedy, KV cache on, the library's own defaults otherwise."""
    import torch
    from transformers import AutoModelForCausalLM

    from engine_service.worker.checkpoint import fetch_checkpoint

    folder = fetch_checkpoint(llm.config, lambda *_: None).folder
    dtype = getattr(torch, llm.facts.dtype)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    model.eval().to(llm.facts.device)
    input_ids = torch.tensor(prompts, device=llm.facts.device)
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

"""Offline throughput through `tidemill.LLM`: of the known request sets beside their bounds, or of
equal requests beside transformers.

With `--set`, every set runs `repeats` times in one process after start-up and the best counts:
tokens per second, and how far that is from what the device could do.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from engine_service.config import EngineConfig
from tidemill.bench import beside_transformers
from tidemill.bench.bounds import OneOrMore, Part, Whole, ZeroOrMore
from tidemill.bench.early import kept_if_ended
from tidemill.bench.engines import OpenEngine, open_engine
from tidemill.bench.others import FOR_EQUALS, refuse_given
from tidemill.bench.probe import KVUse, watch_kv
from tidemill.bench.roofline import as_figures, bound, ceilings_as_figures, ceilings_of
from tidemill.bench.sets import RequestSet, request_sets
from tidemill.runtime.errors import InvalidRequest
from tidemill.runtime.options import Listed

if TYPE_CHECKING:
    from tidemill.llm import LLM
    from tidemill.sampling_params import SamplingParams

_REPEATS = 2
_OF_EQUALS = ("requests", "input_len", "output_len", "threads", "against")
_OF_SETS = ("temperature", "top_k", "top_p")
"""Flags of one kind of run alone: equal requests are greedy, as transformers' are beside them."""
_SAMPLE_EVERY = 16
"""Steps between two looks at the pages: every step would cost 1 % of a small model's step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputOptions:
    """Flags of `tidemill bench throughput`, beside those of the engine."""

    set: Listed | None = None
    """Request sets, separated by commas (mixed256,b1_128_256); without it, equal requests."""
    shape: str | None = None
    """Model shape with random weights instead of --model: qwen3-0.6b, qwen3-8b, qwen3-32b, sdar-8b,
    llada-8b, llada2-mini, ling-mini, or a config.json."""
    temperature: ZeroOrMore = 0.6
    """Temperature of the sets."""
    top_k: Whole = 0
    """Top-k of the sets; 0 keeps all ids."""
    top_p: Part = 1.0
    """Top-p of the sets; 1 keeps all ids."""
    repeats: OneOrMore | None = None
    """Timed runs: the best of 2 counts for sets, the median of 5 otherwise."""
    requests: OneOrMore = 32
    """Equal requests that run together."""
    input_len: OneOrMore = 64
    """Prompt tokens per equal request."""
    output_len: OneOrMore = 128
    """Generated tokens per equal request."""
    threads: OneOrMore = 2
    """Torch threads on CPU, for equal requests."""
    against: Literal["none", "transformers"] = "transformers"
    """Peer that runs the same equal requests in the same process."""
    seed: int = 0
    """Seed of the equal prompts, and of random weights."""


def run(options: ThroughputOptions, config: EngineConfig) -> dict[str, Any]:
    """The figures of every set, or of the comparison.

    Raises InvalidRequest for unknown names and flags of the other kind, RuntimeError when tokens
    are missing.
    """
    _refuse_others(options)
    if options.set is None:
        return beside_transformers.compare(options, config)
    sets = request_sets(options.set)
    longest = max(requests.longest for requests in sets)
    with open_engine(config, options.shape, longest=longest) as engine:
        return _run_sets(options, engine, sets)


def _refuse_others(options: ThroughputOptions) -> None:
    is_set = options.set is not None
    if is_set:
        refuse_given(options, _OF_EQUALS, FOR_EQUALS)
    else:
        refuse_given(options, _OF_SETS, "sets; pass --set")
    if not is_set and options.shape and options.against == "transformers":
        raise InvalidRequest(
            "a shape has no checkpoint that transformers could load; pass --against none",
            param="against",
        )


def _run_sets(
    options: ThroughputOptions, engine: OpenEngine, sets: list[RequestSet]
) -> dict[str, Any]:
    ceilings = ceilings_of(engine.llm.facts.device)
    hf_config, gpus = engine.hf_config(), engine.config.num_ranks
    rows: list[dict[str, Any]] = []
    found = engine.figures() | {
        "temperature": options.temperature,
        "top_k": options.top_k,
        "top_p": options.top_p,
        "ceilings": ceilings_as_figures(ceilings),
        "sets": rows,
    }
    with kept_if_ended(found, rows):
        for drawn in sets:
            requests = drawn.within(engine.llm.facts.vocab_size)
            row = _measure(options, engine.llm, requests)
            least = bound(hf_config, requests, ceilings, gpus) if hf_config else None
            rows.append(row | as_figures(least, row["seconds"]))
    return found


def _measure(options: ThroughputOptions, llm: LLM, requests: RequestSet) -> dict[str, Any]:
    from tidemill.sampling_params import SamplingParams

    params = [
        SamplingParams(
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            max_tokens=length,
            ignore_eos=True,
        )
        for length in requests.output_lens
    ]
    repeats = options.repeats or _REPEATS
    seconds: list[float] = []
    with watch_kv(llm.engine, every=_SAMPLE_EVERY) as use:
        for repeat in range(1, repeats + 1):
            spent, forwards = _time(llm, requests, params)
            seconds.append(spent)
            line = f"{requests.name}: run {repeat}/{repeats} {spent:.3f} s"
            print(line, file=sys.stderr, flush=True)
    return {"set": requests.name} | _figures(requests, seconds, forwards, use)


def _time(llm: LLM, requests: RequestSet, params: list[SamplingParams]) -> tuple[float, int]:
    """Seconds of one run, and the forwards of all requests. Raises RuntimeError unless every
    request got all of its tokens."""
    start = time.perf_counter()
    outputs = llm.generate(requests.prompts, params, use_tqdm=sys.stderr.isatty())
    seconds = time.perf_counter() - start
    lengths = [len(output.outputs[0].token_ids) for output in outputs]
    if lengths != requests.output_lens:
        wanted = requests.output_tokens
        raise RuntimeError(f"{requests.name}: {sum(lengths)} tokens instead of {wanted}")
    return seconds, sum(output.usage.forward_passes for output in outputs)


def _figures(
    requests: RequestSet, seconds: list[float], forwards: int, use: KVUse
) -> dict[str, Any]:
    best, tokens_in, tokens_out = min(seconds), requests.prompt_tokens, requests.output_tokens
    return {
        "requests": len(requests.prompts),
        "prompt_tokens": tokens_in,
        "output_tokens": tokens_out,
        "seconds": round(best, 4),
        "all_seconds": [round(one, 4) for one in seconds],
        "prompt_tokens_per_s": round(tokens_in / best, 1),
        "output_tokens_per_s": round(tokens_out / best, 1),
        "total_tokens_per_s": round((tokens_in + tokens_out) / best, 1),
        "forwards_per_request": round(forwards / len(requests.prompts), 2),
        "tokens_per_forward": round(tokens_out / forwards, 3),
        "kv_slots_used": use.share,
    }


def table(result: dict[str, Any]) -> list[tuple[str, str]]:
    """Lines for the terminal."""
    if "sets" not in result:
        return beside_transformers.table(result)
    lines = [("start-up", f"{result['start_s']:.1f} s")]
    for row in result["sets"]:
        text = f"{row['seconds']:8.3f} s  {row['output_tokens_per_s']:>9,.0f} tok/s out"
        text += f"  {row['prompt_tokens_per_s']:>9,.0f} in"
        text += f"  {row['tokens_per_forward']:.2f} tokens/forward"
        if row["bound_s"] is not None:
            text += f"  bound {row['bound_s']:.3f} s, {row['bound_ratio']:.2f} of it"
        lines.append((row["set"], text))
    return lines

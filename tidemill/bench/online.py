"""Throughput of a served model over HTTP beside the same requests offline.

Offline is `LLM.generate` in a process of its own, which has ended (and freed the device) before the
services start. Online is `tidemill serve`, with more frontends beside it where one Python process
is too few: every request is a stream of /v1/completions over loopback. Prompts are token ids,
lengths are fixed and both get the same engine flags, so the ratio is what serving costs. It does
not know HTTP or processes.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from engine_service.config import EngineConfig
from tidemill.bench.bounds import OneOrMore, ZeroOrMore
from tidemill.bench.engines import open_engine
from tidemill.bench.others import FOR_EQUALS, refuse_given
from tidemill.bench.percentiles import percentiles_ms
from tidemill.bench.services import Services, services_of
from tidemill.bench.sets import RequestSet, fixed, request_sets
from tidemill.bench.streams import Observed, Request, stream_all
from tidemill.runtime.errors import InvalidRequest
from tidemill.runtime.options import Listed

_OF_EQUALS = ("requests", "input_len", "output_len")
"""Flags that sets, which say these themselves, do not read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OnlineOptions:
    """Flags of `tidemill bench online`, beside those of the engine."""

    set: Listed | None = None
    """Request sets, separated by commas (mixed256); without it, equal requests."""
    shape: str | None = None
    """Model shape with random weights instead of --model: qwen3-0.6b, qwen3-8b, qwen3-32b, or a
    config.json."""
    requests: OneOrMore = 256
    """Equal requests."""
    input_len: OneOrMore = 128
    """Prompt tokens per equal request."""
    output_len: OneOrMore = 256
    """Generated tokens per equal request."""
    concurrency: OneOrMore = 256
    """Streams that are open at the same time; also max_rows, where that is not given."""
    frontends: OneOrMore = 1
    """Frontend processes that share the streams, each with a client process of its own."""
    temperature: ZeroOrMore = 0.6
    """Temperature of all requests."""
    repeats: OneOrMore = 2
    """Runs of each kind; the best one counts."""


def run(options: OnlineOptions, config: EngineConfig) -> dict[str, Any]:
    """The figures of every set.

    Raises InvalidRequest for values that cannot work, RuntimeError when tokens are missing or a
    service does not start.
    """
    if not 1 <= options.frontends <= options.concurrency:
        raise InvalidRequest("every frontend needs a stream", param="frontends")
    if options.set is not None:
        refuse_given(options, _OF_EQUALS, FOR_EQUALS)
    sets = [_equal(options)] if options.set is None else request_sets(options.set)
    longest = max(requests.longest for requests in sets)
    config = replace(
        config,
        prefix_caching=False,
        max_model_len=config.max_model_len or longest,
        max_rows=config.max_rows or options.concurrency,
    )
    facts, vocab_size, alone = _in_own_process(options, config, sets)
    sets = [requests.within(vocab_size) for requests in sets]
    print("starting the services ...", file=sys.stderr)
    with services_of(config, options.frontends, options.shape) as services:
        rows = [
            _compared(requests, seconds, _online(options, services, requests))
            for requests, seconds in zip(sets, alone, strict=True)
        ]
    beside = {name: getattr(options, name) for name in ("concurrency", "frontends", "temperature")}
    return facts | beside | {"sets": rows}


def table(result: dict[str, Any]) -> list[tuple[str, str]]:
    """Lines for the terminal."""
    lines = []
    for row in result["sets"]:
        online, offline = row["online"], row["offline"]
        lines += [
            (row["set"], f"{row['ratio']:.3f} of offline"),
            ("  offline tok/s", f"{offline['output_tokens_per_s']:>10,.0f}"),
            ("  online tok/s", f"{online['output_tokens_per_s']:>10,.0f}"),
            ("  first token ms", _listed(online["first_token_ms"])),
            ("  between deliveries ms", _listed(online["between_deliveries_ms"])),
            ("  tokens per delivery", f"{online['tokens_per_delivery']:.2f}"),
        ]
        for role, share in online["cpu_share"].items():
            per_token = online["cpu_us_per_token"][role]
            lines.append((f"  CPU of {role}", f"{share:.2f} cores, {per_token:.1f} us per token"))
    return lines


def _listed(percentiles: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:,.1f}" for name, value in percentiles.items())


def _equal(options: OnlineOptions) -> RequestSet:
    lengths = options.requests, options.input_len, options.output_len
    return RequestSet("x".join(map(str, lengths)), *fixed(*lengths))


def _in_own_process(
    options: OnlineOptions, config: EngineConfig, sets: list[RequestSet]
) -> tuple[dict[str, Any], int, list[list[float]]]:
    """What the engine was, how many ids it knows, and the seconds of every run of every set."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as own:
        return own.submit(_offline, options, config, sets).result()


def _offline(
    options: OnlineOptions, config: EngineConfig, sets: list[RequestSet]
) -> tuple[dict[str, Any], int, list[list[float]]]:
    from tidemill.sampling_params import SamplingParams

    longest = max(requests.longest for requests in sets)
    seconds: list[list[float]] = []
    with open_engine(config, options.shape, longest=longest) as engine:
        vocab_size = engine.llm.facts.vocab_size
        for requests in [drawn.within(vocab_size) for drawn in sets]:
            params = [
                SamplingParams(temperature=options.temperature, max_tokens=length, ignore_eos=True)
                for length in requests.output_lens
            ]
            seconds.append([])
            for _ in range(options.repeats):
                start = time.perf_counter()
                outputs = engine.llm.generate(requests.prompts, params, use_tqdm=False)
                seconds[-1].append(time.perf_counter() - start)
                print(f"{requests.name}: offline {seconds[-1][-1]:.3f} s", file=sys.stderr)
                if [len(o.outputs[0].token_ids) for o in outputs] != requests.output_lens:
                    raise RuntimeError(f"{requests.name}: tokens are missing offline")
        return engine.figures(), vocab_size, seconds


def _online(options: OnlineOptions, services: Services, requests: RequestSet) -> dict[str, Any]:
    """The figures of the best run, and the seconds of all."""
    asked = [
        Request(prompt, length, options.temperature)
        for prompt, length in zip(requests.prompts, requests.output_lens, strict=True)
    ]
    runs: list[tuple[float, dict[str, Any]]] = []
    for _ in range(options.repeats):
        before: dict[str, float] = {}

        def begin(before: dict[str, float] = before) -> None:
            before.update(services.cpu_s())

        seen = stream_all(services.ports, asked, options.concurrency, on_begin=begin)
        spent = {role: now - before[role] for role, now in services.cpu_s().items()}
        seconds = seen.ended - seen.began
        runs.append((seconds, _figures(seen, spent | {"busiest client": seen.cpu_s})))
        print(f"{requests.name}: online {seconds:.3f} s", file=sys.stderr)
    best = min(runs, key=lambda one: one[0])[1]
    return best | {"all_seconds": [round(seconds, 4) for seconds, _ in runs]}


def _figures(seen: Observed, cpu_s: dict[str, float]) -> dict[str, Any]:
    seconds = seen.ended - seen.began
    return {
        "seconds": round(seconds, 4),
        "output_tokens_per_s": round(seen.tokens / seconds, 1),
        "first_token_ms": percentiles_ms(seen.first_s),
        "between_deliveries_ms": percentiles_ms(seen.gap_s),
        "tokens_per_delivery": round(seen.tokens / seen.events, 3),
        "cpu_share": {role: round(spent / seconds, 3) for role, spent in cpu_s.items()},
        "cpu_us_per_token": {
            role: round(spent * 1e6 / seen.tokens, 2) for role, spent in cpu_s.items()
        },
    }


def _compared(requests: RequestSet, alone: list[float], online: dict[str, Any]) -> dict[str, Any]:
    offline = {
        "seconds": round(min(alone), 4),
        "output_tokens_per_s": round(requests.output_tokens / min(alone), 1),
        "all_seconds": [round(seconds, 4) for seconds in alone],
    }
    return {
        "set": requests.name,
        "requests": len(requests.prompts),
        "prompt_tokens": requests.prompt_tokens,
        "output_tokens": requests.output_tokens,
        "ratio": round(min(alone) / online["seconds"], 4),
        "offline": offline,
        "online": online,
    }

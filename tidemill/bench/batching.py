"""Continuous over static batching, and how much of the KV pages live tokens fill.

Eight times as many requests as seats, with output lengths log-uniform in low..high. Static batching
runs groups of as many requests as there are seats; the shape of a batch stays until its longest
request ends, so the others go on and what they produce is thrown away, as in a `generate` over a
padded batch. Continuous batching is given all requests at once and refills a seat when its request
ends (Yu et al. 2022, Orca). Between the two: groups whose requests leave when they end, which makes
their last steps shorter but not fewer. Same engine, same requests. It does not know how the engine
schedules.
"""

from __future__ import annotations

import math
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine_service.config import EngineConfig
from tidemill.bench.bounds import OneOrMore
from tidemill.bench.engines import open_engine
from tidemill.bench.probe import counted, watch_kv
from tidemill.bench.sets import MAX_TOKEN_ID, RequestSet, request_sets
from tidemill.runtime.errors import InvalidRequest
from tidemill.runtime.options import Listed

if TYPE_CHECKING:
    from tidemill.llm import LLM
    from tidemill.outputs import RequestOutput

_TARGETS = {8: 1.8, 16: 1.8, 32: 2.0, 64: 2.5}
"""By seats: the ratio that we want to reach."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchingOptions:
    """Flags of `tidemill bench batching`, beside those of the engine."""

    shape: str | None = None
    """Model shape with random weights instead of --model."""
    seats: Listed = "8,16,32,64"
    """Requests that run at a time (--max-rows); one engine and one row of figures per number."""
    per_seat: OneOrMore = 8
    """Requests in all, as a multiple of the seats."""
    input_len: OneOrMore = 128
    """Prompt tokens per request."""
    shortest: OneOrMore = 16
    """Least output tokens of a request."""
    longest: OneOrMore = 1024
    """Most output tokens of a request."""
    kv_set: Listed = "mixed256"
    """Request set on which the use of KV slots is measured; none leaves that out."""
    seed: int = 0
    """Seed of the requests and of random weights."""


def run(options: BatchingOptions, config: EngineConfig) -> dict[str, Any]:
    """Seconds, steps and ratios by seats, and the share of KV slots used.

    Raises InvalidRequest for wrong names and numbers.
    """
    seats = _numbers(options.seats)
    if not 1 <= options.shortest <= options.longest:
        raise InvalidRequest("outputs need 1 <= shortest <= longest", param="shortest")
    ratios = [_compare(options, config, number) for number in seats]
    sets = [] if options.kv_set == "none" else request_sets(options.kv_set)
    return {
        "shape": options.shape,
        "model": None if options.shape else config.model,
        "options": {name: getattr(options, name) for name in options.__dataclass_fields__},
        "seats": ratios,
        "kv": [_measure_kv(options, config, requests) for requests in sets],
    }


def _numbers(words: str) -> list[int]:
    if not all(word.isdigit() and int(word) > 0 for word in words.split(",")):
        raise InvalidRequest(f"{words!r} is not a list of seats; write 8,16", param="seats")
    return [int(word) for word in words.split(",")]


def draw(options: BatchingOptions, seats: int) -> RequestSet:
    """Random prompts of one length; logarithms of output lengths are uniform."""
    rng = random.Random(options.seed)
    low, high = math.log(options.shortest), math.log(options.longest + 1)
    prompts, lens = [], []
    for _ in range(seats * options.per_seat):
        prompts.append([rng.randint(0, MAX_TOKEN_ID) for _ in range(options.input_len)])
        lens.append(min(options.longest, int(math.exp(rng.uniform(low, high)))))
    return RequestSet(f"{seats} seats", prompts, lens)


def _compare(options: BatchingOptions, config: EngineConfig, seats: int) -> dict[str, Any]:
    requests = draw(options, seats)
    longest = options.input_len + options.longest
    with open_engine(config, options.shape, longest=longest, max_rows=seats) as engine:
        if engine.llm.facts.max_rows != seats:
            raise InvalidRequest("--seats sets the rows: leave --max-rows out", param="max_rows")
        requests = requests.within(engine.llm.facts.vocab_size)
        _run(engine.llm, requests, _groups(requests, seats), limit=2)
        static_s, static_steps = _run(engine.llm, requests, _groups(requests, seats, padded=True))
        leaving_s, _ = _run(engine.llm, requests, _groups(requests, seats))
        continuous_s, steps = _run(engine.llm, requests, [requests.output_lens])
    ratio = static_s / continuous_s
    line = f"{seats} seats: static {static_s:.2f} s, continuous {continuous_s:.2f} s, {ratio:.2f}x"
    print(line, file=sys.stderr, flush=True)
    return {
        "seats": seats,
        "requests": len(requests.prompts),
        "output_tokens": requests.output_tokens,
        "static_s": round(static_s, 4),
        "leaving_s": round(leaving_s, 4),
        "continuous_s": round(continuous_s, 4),
        "static_steps": static_steps,
        "continuous_steps": steps,
        "ratio": round(ratio, 3),
        "ratio_leaving": round(leaving_s / continuous_s, 3),
        "target": _TARGETS.get(seats),
    }


def _groups(requests: RequestSet, seats: int, *, padded: bool = False) -> list[list[int]]:
    """Output lengths by group of `seats` requests; `padded`: all as long as the group's longest."""
    lens = requests.output_lens
    groups = [lens[at : at + seats] for at in range(0, len(lens), seats)]
    return [[max(group)] * len(group) for group in groups] if padded else groups


def _run(
    llm: LLM, requests: RequestSet, groups: Sequence[list[int]], *, limit: int | None = None
) -> tuple[float, int]:
    """Seconds and steps of all requests, group after group; `groups` are output lengths.

    `limit` cuts outputs short: such a run only warms up.
    """
    from tidemill.sampling_params import SamplingParams

    prompts = iter(requests.prompts)
    with counted(llm.engine.executor, "launch") as launches:
        start = time.perf_counter()
        for group in groups:
            lens = [min(limit or length, length) for length in group]
            params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in lens]
            outputs = llm.generate([next(prompts) for _ in lens], params, use_tqdm=False)
            _check(outputs, lens)
        seconds = time.perf_counter() - start
    return seconds, len(launches)


def _check(outputs: Sequence[RequestOutput], lens: Sequence[int]) -> None:
    for output, wanted in zip(outputs, lens, strict=True):
        if len(output.outputs[0].token_ids) != wanted:
            raise RuntimeError(f"{output.request_id} has not all of its {wanted} tokens")


def _measure_kv(
    options: BatchingOptions, config: EngineConfig, requests: RequestSet
) -> dict[str, Any]:
    from tidemill.sampling_params import SamplingParams

    with open_engine(config, options.shape, longest=requests.longest) as engine:
        requests = requests.within(engine.llm.facts.vocab_size)
        params = [
            SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
            for length in requests.output_lens
        ]
        with watch_kv(engine.llm.engine) as use:
            engine.llm.generate(requests.prompts, params, use_tqdm=sys.stderr.isatty())
        page_size = engine.llm.facts.page_size
    return {"set": requests.name, "page_size": page_size, "kv_slots_used": use.share}


def table(result: dict[str, Any]) -> list[tuple[str, str]]:
    """Lines for the terminal."""
    lines = []
    for row in result["seats"]:
        target = "" if row["target"] is None else f"  target {row['target']:.1f}"
        steps = f"{row['static_steps']} to {row['continuous_steps']} steps"
        times = f"static {row['static_s']:.2f} s, continuous {row['continuous_s']:.2f} s"
        leaving = f"{row['ratio_leaving']:.2f}x where rows may leave"
        ratio = f"{row['ratio']:.2f}x{target}"
        lines.append((f"{row['seats']} seats", f"{ratio}  {times}, {steps}; {leaving}"))
    for row in result["kv"]:
        used = row["kv_slots_used"]
        share = "no page of KV was used" if used is None else f"{100 * used:.1f} % of KV slots"
        lines.append((row["set"], f"{share}, pages of {row['page_size']}"))
    return lines

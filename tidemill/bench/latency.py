"""How long a caller waits: for the first token, and from token to token.

Requests are kept alive in a closed loop: a new one is submitted when one ends, until all have been.
Time to first token counts from submission, so it holds the wait for a seat and for the steps of
others. Tokens leave the engine step by step; the gap is between two steps that gave the request
tokens, so a method that decides several tokens a step has fewer gaps than tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean
from typing import TYPE_CHECKING, Any

from engine_service.config import EngineConfig
from tidemill.bench.bounds import OneOrMore, ZeroOrMore
from tidemill.bench.engines import open_engine
from tidemill.bench.others import FOR_EQUALS, refuse_given
from tidemill.bench.percentiles import percentiles_ms
from tidemill.bench.probe import Arrivals, watch_arrivals
from tidemill.bench.sets import RequestSet, fixed, request_sets
from tidemill.runtime.errors import InvalidRequest
from tidemill.runtime.options import Listed

if TYPE_CHECKING:
    from tidemill.llm import LLM

_ROWS = 256
"""Most of the engine, where no --max-rows says another number."""
_OF_EQUALS = ("input_len", "output_len", "concurrency", "rounds")
"""Flags that sets, which say these themselves, do not read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyOptions:
    """Flags of `tidemill bench latency`, beside those of the engine."""

    shape: str | None = None
    """Model shape with random weights instead of --model."""
    set: Listed | None = None
    """Request sets, separated by commas, each submitted at once; without it, equal requests."""
    input_len: OneOrMore = 128
    """Prompt tokens per equal request."""
    output_len: OneOrMore = 128
    """Generated tokens per equal request."""
    concurrency: Listed = "1,32"
    """Equal requests alive at a time; one row of figures per number."""
    rounds: OneOrMore = 4
    """Equal requests in all, as a multiple of the concurrency."""
    temperature: ZeroOrMore = 0.6
    """Sampling temperature."""


@dataclass(frozen=True, slots=True)
class _Case:
    requests: RequestSet
    concurrency: int

    def first_round(self) -> _Case:
        """As many requests as are alive at a time."""
        drawn, count = self.requests, self.concurrency
        begun = RequestSet(drawn.name, drawn.prompts[:count], drawn.output_lens[:count])
        return _Case(begun, count)


def run(options: LatencyOptions, config: EngineConfig) -> dict[str, Any]:
    """Figures of every case. Raises InvalidRequest for wrong names and numbers."""
    cases = _cases(options, config)
    longest = max(case.requests.longest for case in cases)
    rows = max(case.concurrency for case in cases)
    with open_engine(config, options.shape, longest=longest, max_rows=min(rows, _ROWS)) as engine:
        figures = engine.figures()
        _say_who_waits(rows, figures["max_rows"])
        # The first requests meet cold caches, and kernels that are compiled when first needed.
        for case in cases:
            _drive(engine.llm, case.first_round(), options.temperature)
        measured = [_measure(engine.llm, case, options.temperature) for case in cases]
    return figures | {"temperature": options.temperature, "cases": measured}


def _say_who_waits(alive: int, max_rows: int) -> None:
    if alive > max_rows:
        print(
            f"{alive} requests are alive at a time and {max_rows} of them have a row; the wait of "
            f"the others is in their times: raise --max-rows to {alive} to run all at once",
            file=sys.stderr,
        )


def _cases(options: LatencyOptions, config: EngineConfig) -> list[_Case]:
    if options.set is not None:
        refuse_given(options, _OF_EQUALS, FOR_EQUALS)
        sets = request_sets(options.set)
        return [_Case(requests, len(requests.prompts)) for requests in sets]
    cases = []
    for word in options.concurrency.split(","):
        if not word.isdigit() or int(word) < 1:
            raise InvalidRequest(
                f"{word!r} is not a number of requests; write 1,32", param="concurrency"
            )
        alive = int(word)
        draw = fixed(alive * options.rounds, options.input_len, options.output_len, config.seed)
        name = f"{alive} x {options.input_len} in, {options.output_len} out"
        cases.append(_Case(RequestSet(name, *draw), alive))
    return cases


def _measure(llm: LLM, case: _Case, temperature: float) -> dict[str, Any]:
    print(f"{case.requests.name} ...", file=sys.stderr, flush=True)
    with watch_arrivals(llm.engine) as arrivals:
        _drive(llm, case, temperature)
    return {
        "name": case.requests.name,
        "concurrency": case.concurrency,
        "requests": len(case.requests.prompts),
    } | summarize(arrivals)


def _drive(llm: LLM, case: _Case, temperature: float) -> None:
    """Runs all requests of the case, `concurrency` at a time."""
    from tidemill.sampling_params import SamplingParams

    requests = case.requests.within(llm.facts.vocab_size)
    waiting = list(zip(requests.prompts, requests.output_lens, strict=True))[::-1]
    alive = 0
    while waiting or alive:
        while waiting and alive < case.concurrency:
            prompt, length = waiting.pop()
            params = SamplingParams(temperature=temperature, max_tokens=length, ignore_eos=True)
            llm.add_request(prompt, params)
            alive += 1
        for output in llm.step():
            llm.get_output(output.request_id)
            alive -= 1


def summarize(arrivals: Arrivals) -> dict[str, Any]:
    """Percentiles in milliseconds of the time to first token and of the gaps between outputs."""
    times = arrivals.token_times()
    first = [seen[0] - arrivals.submitted[key] for key, seen in times.items()]
    gaps = [later - sooner for seen in times.values() for sooner, later in pairwise(seen)]
    whole = [seen[-1] - arrivals.submitted[key] for key, seen in times.items()]
    named = {"first_token_ms": first, "inter_token_ms": gaps, "request_ms": whole}
    return {name: percentiles(found) for name, found in named.items()}


def percentiles(seconds: Sequence[float]) -> dict[str, float] | None:
    """Milliseconds: mean, percentiles and the largest; None without values."""
    if not seconds:
        return None
    around = {"mean": mean(seconds), "max": max(seconds)}
    whole = {name: round(1e3 * value, 3) for name, value in around.items()}
    return {"mean": whole["mean"], **percentiles_ms(seconds), "max": whole["max"]}


def table(result: dict[str, Any]) -> list[tuple[str, str]]:
    """Lines for the terminal."""
    lines = []
    for case in result["cases"]:
        lines.append((case["name"], ""))
        for name in ("first_token_ms", "inter_token_ms"):
            found = case[name]
            if found is not None:
                text = "  ".join(f"{key} {value:.2f}" for key, value in found.items())
                lines.append((f"  {name}", text))
    return lines

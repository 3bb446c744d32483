"""Milliseconds of a forward of so many requests, by the length of their blocks.

    python -m benchmarks.block_forwards --shape sdar-8b --blocks 4,8,16,32 --requests 1,16,64,128

Every request has `--context` tokens of prompt and reveals one token a step, so that steps are those
of whole blocks; the output head multiplies the open half of them, on average, where that pays. What
is told is the mean of steps in which all requests have one block, without the shortest and the
longest quarter, host included: the one that opens a block stores the block ahead of it too (with
blocks of one token every step does). `--shape qwen3-8b --blocks 1` is the autoregressive step
beside it, and that of ling-mini beside llada2-mini. Random weights, bfloat16.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

from engine_service.config import EngineConfig
from tidemill.bench.context import context
from tidemill.bench.engines import open_engine
from tidemill.bench.probe import replaced
from tidemill.bench.sets import fixed
from tidemill.bench.shapes import read_shape

if TYPE_CHECKING:
    from tidemill.llm import LLM

_STEPS, _LEAST = 24, 8
"""Steps of whole blocks that are looked for, and that must be found."""
_TOKENS = 64
"""That each request makes."""


@contextmanager
def block_shape(shape: str, block: int) -> Iterator[str]:
    """A config.json of the shape with blocks of that length."""
    config = read_shape(shape)
    keys = [key for key in ("block_size", "block_length") if key in config]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(config | dict.fromkeys(keys, block)))
        yield str(path)


def time_steps(llm: LLM, num_requests: int, num_context: int, block: int) -> list[float]:
    """Milliseconds of the steps in which all requests have one block."""
    from tidemill.sampling_params import SamplingParams

    params = SamplingParams(temperature=0.6, max_tokens=_TOKENS, ignore_eos=True)
    # One token more than is found again, which is whole pages.
    prompts, _ = fixed(num_requests, num_context + 1, _TOKENS)
    prompts = [[token % llm.facts.vocab_size for token in prompt] for prompt in prompts]
    # Known prompts begin in one step, so that all are at the same place of their blocks.
    llm.generate(prompts, replace(params, max_tokens=1), use_tqdm=False)
    for prompt in prompts:
        llm.add_request(prompt, params)
    # A block of one position is stored by the step that opens the next one.
    is_stored_alone = block > 1 or llm.facts.mask_token_id is None
    wanted = num_requests * (block if is_stored_alone else 2)
    times: list[float] = []
    with watched_sizes(llm) as collected:
        while llm.has_unfinished_requests:
            collected.clear()
            start = time.perf_counter()
            llm.step()
            if collected == [wanted]:
                times.append((time.perf_counter() - start) * 1e3)
    return times[_LEAST // 2 : _STEPS + _LEAST // 2]


@contextmanager
def watched_sizes(llm: LLM) -> Iterator[list[int]]:
    """Tokens of every step that is collected. A call of the engine takes as long as the step that
    it waits for: the one that it launches is the next one where steps overlap."""
    sizes: dict[int, int] = {}
    collected: list[int] = []

    def launching(launch: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def watched(plan: Any) -> Any:
            steady = plan.num_spans - len(plan.own_spans)
            handle = launch(plan)
            sizes[id(handle)] = sum(span.num_tokens for span in plan.own_spans) + steady
            return handle

        return watched

    def collecting(collect: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def watched(handle: Any) -> Any:
            # One launched before anybody watched may still be in flight.
            collected.append(sizes.pop(id(handle), 0))
            return collect(handle)

        return watched

    executor = llm.engine.executor
    with replaced(executor, "launch", launching), replaced(executor, "collect", collecting):
        yield collected


def middle_mean(times: Sequence[float]) -> float:
    """The mean of the middle half. A step that is told late makes the next one short, by turns
    where that repeats: a median jumps from one to the other, and a mean alone goes by the one step
    in which something was compiled."""
    cut = len(times) // 4
    return mean(sorted(times)[cut : len(times) - cut])


def time_block(
    said: argparse.Namespace, block: int, counts: Sequence[int]
) -> tuple[dict[str, float | None], dict[str, Any]]:
    """Milliseconds by number of requests, None where too few steps were whole, and what the engine
    says of itself. The engine is out of scope behind it: the next one needs its memory."""
    params = {} if block == 1 else {"threshold": 2.0}
    config = EngineConfig(dtype="bfloat16", default_params=params)
    longest = said.context + 1 + _TOKENS + 2 * block
    row: dict[str, float | None] = {}
    with (
        block_shape(said.shape, block) as path,
        open_engine(
            config, path, longest=longest, max_rows=max(counts), prefix_caching=True
        ) as engine,
    ):
        for count in counts:
            times = time_steps(engine.llm, count, said.context, block)
            row[str(count)] = round(middle_mean(times), 3) if len(times) >= _LEAST else None
        return row, engine.figures()


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a row per length of blocks; 1 where too few steps were whole."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.block_forwards")
    parser.add_argument("--shape", default="sdar-8b")
    parser.add_argument("--blocks", default="4,8,16,32")
    parser.add_argument("--requests", default="1,16,64,128")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--json", type=Path)
    said = parser.parse_args(argv)
    counts = [int(count) for count in said.requests.split(",")]
    found: dict[str, dict[str, float | None]] = {}
    figures: dict[str, Any] = {}
    for block in map(int, said.blocks.split(",")):
        row, figures = time_block(said, block, counts)
        found[str(block)] = row
        print(f"{said.shape} block {block}: {row}", flush=True)
    if said.json:
        result = context("block_forwards") | figures | {"shape": said.shape, "ms": found}
        said.json.write_text(json.dumps(result, indent=2) + "\n")
    if any(value is None for row in found.values() for value in row.values()):
        print("too few steps in which all requests have one block", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

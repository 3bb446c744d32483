"""What a shortcut of the engine saves: the same requests with it and without it, in turn, in one
process, so that both meet the same card at the same clock.

    python -m benchmarks.in_turn open_positions --shape llada2-mini --requests 128 \
      --default-params '{"remasking": "low_confidence", "steps": 10}'
    python -m benchmarks.in_turn last_layer --shape qwen3-8b --requests 64 --input 2048 --output 1

Random weights, bfloat16, `ignore_eos`. A round runs both; the best round of each counts, and all of
them are told. Captured steps keep what they were captured with, so `last_layer` is for prompts.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest.mock import PropertyMock, patch

from engine_service.config import EngineConfig
from engine_service.models.decoder import Decoder
from engine_service.sampling import sampler
from engine_service.worker import graphs
from engine_service.worker.batch import ForwardBatch
from tidemill.bench.context import context
from tidemill.bench.engines import open_engine
from tidemill.bench.sets import fixed
from tidemill.sampling_params import SamplingParams


def _all_positions() -> AbstractContextManager[Any]:
    stack = ExitStack()
    stack.enter_context(patch.object(sampler, "_num_chosen", lambda batch: len(batch.positions)))
    stack.enter_context(patch.object(graphs, "_MANY_FINAL", sys.maxsize))
    return stack


def _all_tokens() -> AbstractContextManager[Any]:
    stack = ExitStack()
    stack.enter_context(patch.object(ForwardBatch, "reads", PropertyMock(return_value=None)))
    stack.enter_context(patch.object(Decoder, "finishes_rows", PropertyMock(return_value=False)))
    return stack


WITHOUT: Mapping[str, Callable[[], AbstractContextManager[Any]]] = MappingProxyType(
    {"open_positions": _all_positions, "last_layer": _all_tokens}
)
"""How each is done without: the output head over all positions of a block, and a last layer that
computes every token."""


def main(argv: Sequence[str] | None = None) -> int:
    """Prints seconds and tokens per second of both; 1 where tokens are missing."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.in_turn")
    parser.add_argument("shortcut", choices=WITHOUT)
    parser.add_argument("--shape", default="llada2-mini")
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--input", type=int, default=128)
    parser.add_argument("--output", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--default-params", type=json.loads, default={})
    parser.add_argument("--json", type=Path)
    said = parser.parse_args(argv)
    prompts, _ = fixed(said.requests, said.input, said.output)
    params = SamplingParams(temperature=said.temperature, max_tokens=said.output, ignore_eos=True)
    config = EngineConfig(dtype="bfloat16", default_params=said.default_params)
    seconds: dict[str, list[float]] = {"with": [], "without": []}
    longest = said.input + said.output + 64
    with open_engine(config, said.shape, longest=longest, max_rows=said.requests) as engine:
        llm = engine.llm
        own = [[token % llm.facts.vocab_size for token in prompt] for prompt in prompts]
        for turn in range(2 * said.rounds + 1):
            kind = "with" if turn % 2 else "without"
            with WITHOUT[said.shortcut]() if kind == "without" else ExitStack():
                start = time.perf_counter()
                outputs = llm.generate(own, params, use_tqdm=False)
                spent = time.perf_counter() - start
            num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
            if num_tokens != said.requests * said.output:
                print(f"{num_tokens} tokens of {said.requests * said.output}", file=sys.stderr)
                return 1
            if turn:  # the first one pays for what is loaded when first used
                seconds[kind].append(round(spent, 4))
        figures = engine.figures()
    for kind, runs in seconds.items():
        print(f"{kind:<8} {min(runs):.3f} s {num_tokens / min(runs):9,.0f} tok/s   {runs}")
    print(f"saves {1 - min(seconds['with']) / min(seconds['without']):.1%}")
    if said.json:
        asked = {key: value for key, value in vars(said).items() if key != "json"}
        result = context("in_turn") | figures | {"asked": asked, "seconds": seconds}
        said.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The request sets that throughput is quoted on: lengths and random prompts, the same everywhere.

Prompts are uniformly random token ids, so no tokenizer is needed; seeds and the order of draws are
fixed, so that every engine, and every year, computes the same tokens. It does not know engines.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

from tidemill.runtime.errors import InvalidRequest

MAX_TOKEN_ID = 10_000
"""Largest token id of a prompt."""

Draw = tuple[list[list[int]], list[int]]


@dataclass(frozen=True, slots=True)
class RequestSet:
    """Request i is `prompts[i]` (token ids) and gets exactly `output_lens[i]` tokens."""

    name: str
    prompts: list[list[int]]
    output_lens: list[int]

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def output_tokens(self) -> int:
        return sum(self.output_lens)

    def within(self, vocab_size: int) -> RequestSet:
        """The same set for a smaller vocabulary: token ids modulo its size."""
        if vocab_size > MAX_TOKEN_ID:
            return self
        prompts = [[token % vocab_size for token in prompt] for prompt in self.prompts]
        return RequestSet(self.name, prompts, self.output_lens)

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and output together."""
        return max(len(p) + n for p, n in zip(self.prompts, self.output_lens, strict=True))


def mixed(requests: int, low: int, high: int, seed: int) -> Draw:
    """Prompt and output lengths uniform in low..high; all prompts are drawn before all outputs."""
    rng = random.Random(seed)
    prompts = [
        [rng.randint(0, MAX_TOKEN_ID) for _ in range(rng.randint(low, high))]
        for _ in range(requests)
    ]
    return prompts, [rng.randint(low, high) for _ in range(requests)]


def fixed(requests: int, input_len: int, output_len: int, seed: int = 1) -> Draw:
    """Requests of equal lengths."""
    rng = random.Random(seed)
    prompts = [[rng.randint(0, MAX_TOKEN_ID) for _ in range(input_len)] for _ in range(requests)]
    return prompts, [output_len] * requests


SETS: Mapping[str, Callable[[], Draw]] = MappingProxyType(
    {
        "mixed256": partial(mixed, 256, 100, 1024, 0),
        "b1_128_256": partial(fixed, 1, 128, 256),
        "b1_512_512": partial(fixed, 1, 512, 512),
        "b8_128_128": partial(fixed, 8, 128, 128),
        "b8_128_256": partial(fixed, 8, 128, 256),
        "b32_128_256": partial(fixed, 32, 128, 256),
        "b128_128_256": partial(fixed, 128, 128, 256),
        "b256_1024_128": partial(fixed, 256, 1024, 128),
        "prefill64x2048": partial(fixed, 64, 2048, 1),
        "long8x16384_64": partial(fixed, 8, 16384, 64),
    }
)
"""b32_128_256: 32 requests of 128 tokens in, 256 out."""


def request_sets(names: str) -> list[RequestSet]:
    """The sets of a comma-separated list; raises InvalidRequest for an unknown name."""
    listed = [name.strip() for name in names.split(",")]
    for name in listed:
        if name not in SETS:
            raise InvalidRequest(f"unknown set {name!r}; known: {', '.join(SETS)}", param="set")
    return [RequestSet(name, *SETS[name]()) for name in listed]

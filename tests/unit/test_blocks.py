"""Blocks of an answer, against positions counted one by one; what is told of them."""

from __future__ import annotations

import random
from typing import Any

import pytest

from engine_service.core.blocks import Blocks
from engine_service.core.messages import Finish, FinishReason, Submit, Timings, Usage
from engine_service.core.params import DecodingChoice, SamplingParams
from engine_service.server.request_trace import RequestTrace


def touched_slowly(blocks: Blocks, prompt_len: int, num_output: int, pinned: list[int]) -> int:
    """Blocks from the end of the prompt to the last generated token, by walking there."""
    position, left, last = prompt_len, num_output, prompt_len
    while left:
        if position not in pinned:
            left, last = left - 1, position
        position += 1
    return len({(at - blocks.start) // blocks.size for at in range(prompt_len, last + 1)})


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("is_models", [True, False])
def test_blocks_are_counted_over_pinned_tokens(seed: int, is_models: bool) -> None:
    rng, differs = random.Random(seed), 0
    for _ in range(500):
        size, prompt_len, num_output = (
            rng.choice([1, 4, 16]),
            rng.randint(1, 40),
            rng.randint(1, 40),
        )
        blocks = Blocks(0 if is_models else prompt_len, size)
        pinned = rng.sample(range(prompt_len, prompt_len + 80), rng.randint(0, 40))
        found = blocks.num_generated(prompt_len, num_output, pinned)
        assert found == touched_slowly(blocks, prompt_len, num_output, pinned)
        differs += found != touched_slowly(blocks, prompt_len, num_output, [])
    assert differs > 100, "pinned tokens never mattered"


def test_a_suffix_behind_the_last_generated_token_adds_no_block() -> None:
    """A gap of 8 in the first block of 16, a prefix of 4, a suffix that goes on for two blocks."""
    assert Blocks(0, 16).num_generated(4, 8, list(range(12, 44))) == 1
    assert Blocks(0, 16).num_generated(4, 8, list(range(4, 36))) == 3
    assert Blocks(4, 16).num_generated(4, 17, []) == 2


class Recorder:
    """Tracer and span in one; keeps the attributes of its end."""

    recording = True
    context = None

    def __init__(self) -> None:
        self.attributes: dict[str, Any] = {}

    def child(self, *_: Any, **__: Any) -> Recorder:
        return Recorder()

    def event(self, *_: Any) -> None:
        """Not looked at."""

    def end(self, *, attributes: dict[str, Any] | None = None, **_: Any) -> None:
        self.attributes = attributes or {}


def traced(num_denoised: int) -> dict[str, Any]:
    """Attributes of a request that ended with 8 generated tokens of 3 blocks."""
    sampling, decoding = SamplingParams(), DecodingChoice()
    submit = Submit(key=1, request_id="r", prompt=b"", sampling=sampling, decoding=decoding)
    usage = Usage(4, 0, 8, 1 + num_denoised, num_denoised, 0)
    recorder = Recorder()
    trace = RequestTrace(recorder, submit, 1)  # type: ignore[arg-type]
    trace.ended(Finish(FinishReason.LENGTH, None, "", usage, Timings(0, 0, 0, 0), num_blocks=3))
    return recorder.attributes


def test_only_requests_that_denoise_have_blocks_in_their_span() -> None:
    assert traced(2)["tidemill.blocks"] == 3
    assert "tidemill.blocks" not in traced(0)
    assert traced(0)["gen_ai.usage.output_tokens"] == 8

"""What a request's span says of its blocks, against positions counted one by one."""

from __future__ import annotations

import random
from typing import Any

from engine_service.core.messages import Finish, FinishReason, Submit, Timings, Usage
from engine_service.core.params import DecodingChoice, SamplingParams
from engine_service.server.request_trace import trace_request


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


def traced(
    prompt_len: int, num_output: int, pinned: list[int], block: int, *, num_denoised: int = 1
) -> dict[str, Any]:
    """Attributes of a request that ended with `num_output` generated tokens."""
    submit = Submit(
        key=1,
        request_id="r",
        prompt=b"\0\0\0\0" * prompt_len,
        sampling=SamplingParams(),
        decoding=DecodingChoice(),
        pinned=tuple((position, 65) for position in pinned),
    )
    usage = Usage(prompt_len, 0, num_output, 1 + num_denoised, num_denoised, 0)
    recorder = Recorder()
    end = trace_request(recorder, submit, block, 1)  # type: ignore[arg-type]
    end(Finish(FinishReason.LENGTH, None, "", usage, Timings(0, 0, 0, 0)))
    return recorder.attributes


def touched_slowly(prompt_len: int, num_output: int, pinned: list[int], block: int) -> int:
    """Blocks from the end of the prompt to the last generated token, by walking there."""
    position, left, last = prompt_len, num_output, prompt_len
    while left:
        if position not in pinned:
            left, last = left - 1, position
        position += 1
    return len({at // block for at in range(prompt_len, last + 1)})


def test_blocks_are_counted_over_pinned_tokens(seed: int) -> None:
    rng, differs = random.Random(seed), 0
    for _ in range(500):
        block, prompt_len, num_output = (
            rng.choice([1, 4, 16]),
            rng.randint(1, 40),
            rng.randint(1, 40),
        )
        behind = range(prompt_len, prompt_len + 80)
        pinned = rng.sample(behind, rng.randint(0, 40))
        want = touched_slowly(prompt_len, num_output, pinned, block)
        assert traced(prompt_len, num_output, pinned, block)["tidemill.blocks"] == want
        differs += want != touched_slowly(prompt_len, num_output, [], block)
    assert differs > 100, "pinned tokens never mattered"


def test_a_suffix_behind_the_last_generated_token_adds_no_block() -> None:
    """A gap of 8 in the first block of 16, a prefix of 4, a suffix that goes on for two blocks."""
    assert traced(4, 8, list(range(12, 44)), 16)["tidemill.blocks"] == 1
    assert traced(4, 8, list(range(4, 36)), 16)["tidemill.blocks"] == 3


def test_a_request_without_denoising_has_no_blocks() -> None:
    assert "tidemill.blocks" not in traced(4, 8, [], 1, num_denoised=0)
    assert traced(4, 8, [], 1, num_denoised=0)["gen_ai.usage.output_tokens"] == 8

"""Pinned tokens: what is refused, what admission makes of them, and what they do to a canvas."""

from __future__ import annotations

import random
import struct
from typing import Any

import pytest

from engine_service.core.admission import Admission, Admitted, Capacity
from engine_service.core.messages import Submit
from engine_service.core.params import DecodingChoice, SamplingParams
from engine_service.core.pinning import (
    MAX_PINNED,
    keep_pinned,
    num_at_end,
    num_pinned_before,
    output_through,
    pin,
    pinned_from,
    read_pinned,
)
from engine_service.core.step import EMPTY_CANVAS, Canvas, Span, TokenLogprobs, Update
from engine_service.core.strategy import DecodeStrategy, ExecutorLimits, ModelFacts
from engine_service.decoding.autoregressive import Autoregressive
from engine_service.decoding.block_diffusion import BlockDiffusion
from engine_service.simulated import SimulatedExecutor
from tests.row_builders import make_plan, make_row
from tidemill.llm import LLM
from tidemill.runtime.errors import InvalidRequest, Unsupported

EOS, MASK, VOCAB = 7, 49, 50
LIMITS = {"prompt_len": 3, "max_tokens": 10, "vocab_size": VOCAB}


def admit(*pinned: tuple[int, int], method: str = "block_diffusion", **sampling: Any) -> Admitted:
    """A prompt of three tokens, admitted with these pinned ones."""
    admission = Admission(
        model=ModelFacts(
            vocab_size=VOCAB,
            max_model_len=8192,
            eos_token_ids=(EOS,),
            max_logprobs=5,
            weight_version="",
        ),
        capacity=Capacity(
            num_pages=4096, page_size=4, token_budget=64, logit_budget=64, span_logits=64
        ),
        strategies={
            "autoregressive": Autoregressive(),
            "block_diffusion": BlockDiffusion(block=8, mask_token_id=MASK),
        },
        default_method="block_diffusion",
        default_params={},
        defaults=SamplingParams(),
    )
    return admission.admit(
        Submit(
            key=1,
            request_id="r",
            prompt=struct.pack("<3I", 1, 2, 3),
            sampling=SamplingParams(**sampling),
            decoding=DecodingChoice(method=method),
            pinned=pinned,
        )
    )


def test_pinned_tokens_are_put_in_order() -> None:
    assert admit((9, 4), (3, MASK), (5, 0), max_tokens=7).pinned == ((3, MASK), (5, 0), (9, 4))
    assert admit(max_tokens=7).pinned == ()
    assert admit((8190, 1)).pinned == ((8190, 1),)


@pytest.mark.parametrize(
    ("pinned", "words"),
    [
        ([(5, 1), (4, 1), (5, 2)], "position 5 more than once; name each"),
        ([(2, 1)], "position 2, inside of the prompt of 3 tokens; .* at 3 or later"),
        ([(13, 1)], "position 13, but max_tokens is 10: .* raise max_tokens to at least 11"),
        ([(p, 1) for p in range(3, 13)], "all 10 positions .* raise max_tokens above 10"),
        ([(4, VOCAB)], r"token id 50; ids of this model are in \[0, 50\)"),
        ([(4, -1)], r"token id -1; ids of this model are in \[0, 50\)"),
        ([(p, 1) for p in range(3, 4100)], f"4097 entries; at most {MAX_PINNED} are allowed"),
    ],
)
def test_what_cannot_be_pinned_is_named(pinned: list[tuple[int, int]], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as refused:
        admit(*pinned, max_tokens=10 if len(pinned) < 99 else 5000)
    assert refused.value.param == "pinned"


def test_a_method_that_appends_cannot_pin() -> None:
    with pytest.raises(Unsupported, match=r"'autoregressive' does not support pinned") as refused:
        admit((5, 1), method="autoregressive")
    assert refused.value.param == "pinned"
    assert admit(method="autoregressive").pinned == ()


def test_nothing_stops_a_request_before_its_last_pinned_token() -> None:
    sampling = admit((5, 1), (8, 1), max_tokens=9, stop_token_ids=(4,)).sampling
    assert (sampling.min_tokens, sampling.suppress) == (6, (4, EOS))
    assert admit((5, 1), max_tokens=9, min_tokens=8).sampling.min_tokens == 8
    assert admit(max_tokens=9).sampling.min_tokens == 0
    assert admit(max_tokens=9).sampling.suppress == ()


def scored(token: int) -> TokenLogprobs:
    return TokenLogprobs((token,), (-1.0,), 1)


def test_a_canvas_gets_what_falls_into_it() -> None:
    canvas = Canvas((MASK, 4, MASK, MASK), (False, True, False, False), 2)
    pinned = ((9, 5), (10, 6), (12, 7), (14, 8))
    filled = pin(canvas, 10, pinned)
    assert filled == Canvas((6, 4, 7, MASK), (True, True, True, False), 2)
    assert pin(filled, 10, pinned) == filled
    assert pin(canvas, 20, pinned) is canvas
    assert pin(EMPTY_CANVAS, 10, pinned) is EMPTY_CANVAS


def test_slices_of_pinned_tokens_equal_filters(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(50):
        pairs = [(p, rng.randrange(VOCAB)) for p in range(3, 13) if rng.random() < 0.4]
        pinned = read_pinned(rng.sample(pairs, len(pairs)), **LIMITS)
        assert pinned == tuple(pairs)
        assert output_through(pinned, 3) == max((p - 2 for p, _ in pairs), default=0)
        for position in range(15):
            assert pinned_from(pinned, position) == tuple(x for x in pairs if x[0] >= position)
            assert num_pinned_before(pinned, position) == sum(p < position for p, _ in pairs)


def test_a_tail_that_is_pinned_is_committed_with_the_last_decision() -> None:
    opened = Canvas((MASK,) * 4, (False,) * 4)
    pinned = ((5, 1), (8, 2), (9, 3))
    kept = keep_pinned(Update([11, 12], [scored(11), None], 4, opened), 4, pinned, 12)
    assert kept == Update([11, 12], [scored(11), None], 4, pin(opened, 6, pinned))
    assert kept.canvas.fixed == (False, False, True, True)
    ended = keep_pinned(Update([11, 12], [scored(11), scored(12)], 4, opened), 6, pinned, 10)
    assert ended == Update([11, 12, 2, 3], [scored(11), scored(12), None, None], 4, EMPTY_CANVAS)
    beyond = Update([11, 12, 13, 14, 15], None, 4, opened)
    assert keep_pinned(beyond, 6, ((6, 11),), 10) == beyond


def test_the_simulated_executor_keeps_what_is_given() -> None:
    limits = ExecutorLimits(num_pages=8, page_size=8, max_rows=1, max_model_len=64)
    executor = SimulatedExecutor(limits, vocab_size=50, step_s=0.0, never=frozenset({EOS}))
    canvas = Canvas((MASK, 4, MASK), (False, True, False))
    new = make_row(0, [1, 2, 3], canvas=canvas)._replace(pinned=((7, 9), (8, 9)))
    spans = [Span(0, 0, 6, 6, 8, 3, 6), Span(0, 3, 9, 9, 8, 6, 9), Span(0, 6, 9, 9, 8, 8, 9)]
    decided = executor.collect(executor.launch(make_plan(*spans, rows=(new,)))).own
    tokens = [token for decision in decided if decision for token in decision.token_ids]
    assert [tokens[1], *tokens[4:]] == [4, 9, 9, 9]
    free = executor.launch(
        make_plan(*spans[:2], rows=(new._replace(pinned=(), canvas=EMPTY_CANVAS),))
    )
    without = [token for decision in free.decisions.own if decision for token in decision.token_ids]
    assert [without[i] for i in (0, 2, 3)] == [tokens[i] for i in (0, 2, 3)]
    assert (without[1], without[4]) != (4, 9)


def test_a_simulated_canvas_goes_on_behind_a_block_and_what_is_pinned_there() -> None:
    """Two steps decide the block, as its schedule says, and the first one opens all of it."""
    with LLM("demo-canvas", executor="simulated", skip_tokenizer_init=True) as llm:
        submit = Submit(
            key=1,
            request_id="pinned",
            prompt=bytes(4 * 5),
            sampling=SamplingParams(max_tokens=24, ignore_eos=True),
            decoding=DecodingChoice(params={"block_length": 8, "remasking": "low_confidence"}),
            pinned=tuple((5 + place, 9) for place in range(8, 12)),
        )
        llm._scheduler.submit(submit)
        told: list[int] = []
        while llm.has_unfinished_requests:
            llm._loop.turn()
            for output in llm._mail.take():
                told += memoryview(output.token_ids).cast("I").tolist()
    assert len(told) == 24
    assert told[8:12] == [9] * 4


def test_a_canvas_without_an_open_position_is_decided_at_its_end() -> None:
    undecided = DecodeStrategy.undecided
    assert undecided(5, EMPTY_CANVAS) == (5, 6)
    assert undecided(5, Canvas((1, 2, 3), (True, True, True))) == (7, 8)
    assert undecided(5, Canvas((1, 2, 3), (True, False, True))) == (6, 7)


@pytest.mark.parametrize(
    ("places", "count"), [((), 0), ((9,), 1), ((8,), 0), ((3, 7, 8, 9), 3), ((3, 4, 5), 0)]
)
def test_those_at_the_end_of_an_output_are_counted(places: tuple[int, ...], count: int) -> None:
    assert num_at_end(tuple((place, 1) for place in places), 10) == count

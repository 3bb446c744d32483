"""Pieces of a gRPC stream: the message that is kept for plain text says what a new one would."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from frontend.api.grpc_text_pieces import CHAT, TEXT, Form, Pieces
from frontend.reading import CallDelta
from frontend.text_delta import TextDelta
from tidemill.v1 import text_pb2 as pb

FRAME = {"id": "x-1", "model": "demo", "created_unix_s": 7}


def make(form: Form, options: Any, num_choices: int = 3) -> Pieces:
    prompt = SimpleNamespace(token_ids=[5, 6])
    choices = [SimpleNamespace(index=i, prompt_logprobs=[]) for i in range(num_choices)]
    generation: Any = SimpleNamespace(model=None, choices=choices, prompts=[prompt])
    wanted: Any = SimpleNamespace(options=SimpleNamespace(prompt_logprobs=None))
    return Pieces(form, FRAME, generation, wanted, options)


def deltas(seed: int) -> list[TextDelta]:
    chance, made = random.Random(seed), []
    for number in range(60):
        delta = TextDelta(chance.randrange(3), token_ids=[number])
        delta.text = chance.choice(["", "a", "é\U0001f600", "words " * 40])
        if chance.random() < 0.2:
            delta.reasoning = "why"
        if chance.random() < 0.1:
            delta.calls = [CallDelta(0, "call-1", "f", "{")]
        if chance.random() < 0.05:
            delta.finish_reason = "stop"
        made.append(delta)
    return made


@pytest.mark.parametrize("form", [TEXT, CHAT])
@pytest.mark.parametrize("return_token_ids", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_every_piece_is_what_a_fresh_message_says(
    form: Form, return_token_ids: bool, seed: int
) -> None:
    options = pb.TextOptions(return_token_ids=return_token_ids)
    pieces, num_plain, is_first = make(form, options), 0, True
    for delta in deltas(seed):
        message = pieces.make(delta)
        fresh = make(form, options).make(delta)
        if fresh is not None and not is_first:
            fresh.ClearField("prompt_token_ids")  # once, in the first message
        is_first = False
        if message is None or fresh is None:
            assert message is fresh
            continue
        assert message == fresh
        assert message.SerializeToString() == fresh.SerializeToString()
        num_plain += bool(delta.text)
    assert num_plain > 20


def test_the_message_of_plain_text_is_kept_and_another_is_not() -> None:
    pieces = make(CHAT, pb.TextOptions())
    first = pieces.make(TextDelta(0, text="a", token_ids=[1]))
    assert pieces.make(TextDelta(0, text="b", token_ids=[1])) is first
    assert pieces.make(TextDelta(1, text="b", token_ids=[1])) is not first
    assert pieces.make(TextDelta(0, text="c", finish_reason="stop")) is not first

"""Knobs of diffusion that stand beside `decoding` are read, or refused with where they stand."""

from __future__ import annotations

import json
from dataclasses import fields

import pytest

from engine_service.decoding.block_diffusion import BlockDiffusion
from engine_service.decoding.canvas_cache import KNOBS as CACHE_KNOBS
from engine_service.decoding.full_canvas import FullCanvas
from frontend.api.anthropic_schema import MessagesBody
from frontend.api.jobs import GenerateBody
from frontend.api.not_served import OF_DECODING
from frontend.api.openai_request import parse, to_chat, to_completion
from frontend.api.openai_schema import Body, ChatBody, CompletionBody
from frontend.api.responses_schema import ResponsesBody
from tidemill.runtime.errors import InvalidRequest, Unsupported

VALUES = {"remasking": "threshold", "threshold": 0.5, "steps": 4, "cache": "dual", "eos_last": True}
"""Of a knob each; of all others 1."""
TURNS = [{"role": "user", "content": "a"}]
COMPLETION, CHAT = {"prompt": "a"}, {"messages": TURNS}
WITH_OWN_NAMES = (
    (ResponsesBody, {"input": "a"}),
    (MessagesBody, {"messages": TURNS, "max_tokens": 8}),
    (GenerateBody, {"prompt": "a"}),
)


def read(body: type[Body], fields: dict[str, object]) -> Body:
    return parse(json.dumps(fields).encode(), body)


@pytest.mark.parametrize("name", OF_DECODING)
def test_it_is_refused_where_it_is_not_read(name: str) -> None:
    asked = {name: VALUES.get(name, 1)}
    is_read = name in CompletionBody.model_fields
    of_openai = () if is_read else ((CompletionBody, COMPLETION), (ChatBody, CHAT))
    for body, rest in (*WITH_OWN_NAMES, *of_openai):
        with pytest.raises(Unsupported, match=f"use decoding.params.{name}$") as caught:
            read(body, rest | asked)
        assert caught.value.param == name
        read(body, rest | {name: None})
        read(body, rest | {"decoding": {"params": asked}})


@pytest.mark.parametrize("name", ["remasking", "threshold", "steps"])
def test_completions_and_chats_read_it(name: str) -> None:
    asked = {name: VALUES[name]}
    for found in (
        to_completion(read(CompletionBody, COMPLETION | asked)),
        to_chat(read(ChatBody, CHAT | asked)),
    ):
        assert found.options.decoding.params == asked


@pytest.mark.parametrize("name", ["remasking", "threshold", "steps"])
def test_one_that_stands_in_decoding_too_says_the_same(name: str) -> None:
    """One of the two was ignored."""
    asked = {name: VALUES[name]}
    same = read(CompletionBody, COMPLETION | asked | {"decoding": {"params": asked}})
    assert to_completion(same).options.decoding.params == asked
    other = {"decoding": {"params": {name: "other"}}}
    with pytest.raises(InvalidRequest, match=f"decoding.params.{name} is something") as caught:
        to_chat(read(ChatBody, CHAT | asked | other))
    assert caught.value.param == name


def test_every_knob_of_a_method_is_named() -> None:
    methods = (FullCanvas, BlockDiffusion)
    known = {one.name for method in methods for one in fields(method.Params)}
    assert set(OF_DECODING) == known | set(CACHE_KNOBS)

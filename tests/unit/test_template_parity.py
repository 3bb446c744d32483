"""Prompts have the token ids that transformers' apply_chat_template gives, in every style of
template, from the body of a request on."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import jinja2
import pytest
from transformers import PreTrainedTokenizerFast

from frontend.api.openai_request import parse, to_chat
from frontend.api.openai_schema import ChatBody
from frontend.request import Chat
from frontend.template import ChatTemplate, load_template
from frontend.tokenizer import TextTokenizer
from tests.unit.template_styles import STYLES, TALKS, Talk, write_folder
from tidemill.runtime.errors import InvalidRequest

DATE = {"date_string": "1 Jan 2026"}
"""So that no midnight falls between two renderings."""


class Side:
    """One style's folder as both sides read it."""

    def __init__(self, folder: Path, style: str) -> None:
        write_folder(folder, style)
        self.tokenizer = TextTokenizer(folder)
        self.template: ChatTemplate = load_template(self.tokenizer, None)
        self.theirs = PreTrainedTokenizerFast.from_pretrained(str(folder))

    def ours(self, talk: Talk) -> list[int]:
        kwargs = {**DATE, **talk.body.get("chat_template_kwargs", {})}
        body = {**talk.body, "chat_template_kwargs": kwargs}
        (chat,) = to_chat(parse(json.dumps(body).encode(), ChatBody)).prompts
        assert isinstance(chat, Chat)
        return self.tokenizer.encode(self.template.render(chat), add_special_tokens=False)

    def expected(self, talk: Talk) -> list[int]:
        continues = talk.body.get("continue_final_message", False)
        ids: list[int] = self.theirs.apply_chat_template(
            with_objects(talk.body["messages"]),
            tools=talk.body.get("tools"),
            add_generation_prompt=talk.body.get("add_generation_prompt", not continues),
            continue_final_message=continues,
            return_dict=False,
            **{**DATE, **talk.body.get("chat_template_kwargs", {})},
        )
        return ids


def with_objects(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The arguments of calls as transformers' callers write them."""
    messages = copy.deepcopy(messages)
    for message in messages:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return messages


@pytest.fixture(scope="module", params=STYLES)
def side(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Side:
    return Side(tmp_path_factory.mktemp(request.param), request.param)


def test_there_are_as_many_styles_as_were_promised() -> None:
    assert len(STYLES) >= 12


def test_token_ids_equal_those_of_transformers(side: Side) -> None:
    """What a template refuses, both refuse."""
    lengths = []
    for talk in TALKS:
        try:
            expected = side.expected(talk)
        except (jinja2.TemplateError, TypeError, ValueError):
            with pytest.raises(InvalidRequest, match="cannot render"):
                side.ours(talk)
            continue
        assert side.ours(talk) == expected, talk.name
        lengths.append(len(expected))
    assert len(lengths) > len(TALKS) / 2
    assert len(set(lengths)) > 3, "all prompts look the same"


def test_control_another_environment_gives_other_tokens(side: Side) -> None:
    """Jinja as it comes keeps the line ends of blocks, escapes JSON for HTML and knows no
    raise_exception."""
    plain = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    num_other = 0
    for talk in TALKS:
        try:
            expected = side.expected(talk)
            text = plain.from_string(side.template.source).render(
                messages=with_objects(talk.body["messages"]),
                tools=talk.body.get("tools"),
                add_generation_prompt=talk.body.get("add_generation_prompt", True),
                **side.tokenizer.template_variables,
            )
        except (jinja2.TemplateError, TypeError, ValueError):
            num_other += 1
            continue
        num_other += side.tokenizer.encode(text, add_special_tokens=False) != expected
    assert num_other

"""Conversations offline are read as served ones are, what is wrong with them included."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import orjson
import pytest

from frontend.api.openai_request import parse, to_chat
from frontend.api.openai_schema import ChatBody
from frontend.tokenizer import TextTokenizer
from tests.service.frontends import stack, write_tokenizer
from tidemill import LLM
from tidemill.chats import as_prompts
from tidemill.runtime.errors import InvalidRequest, ServiceError, Unsupported

SHOWN = (
    "{{ tools | tojson if tools }}{{ mood }}{% for m in messages %}<{{ m.role }}>"
    "{{ m.reasoning_content }}{{ m.tool_calls | tojson if m.tool_calls }}{{ m.tool_call_id }}"
    "{{ m.content }}{% endfor %}{{ '<answer>' if add_generation_prompt }}"
)
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": [1]}'}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
HI = {"role": "user", "content": "hi"}
GOOD: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "a text": ([HI], {}),
    "parts": ([{"role": "user", "content": [{"type": "text", "text": x} for x in "ab"]}], {}),
    "developer": ([{"role": "developer", "content": "be kind"}, HI], {}),
    "calls": (
        [HI, {"role": "assistant", "content": None, "tool_calls": [CALL]},
         {"role": "tool", "tool_call_id": "a", "content": "3"}], {},
    ),
    "reasoning": ([HI, {"role": "assistant", "content": "a", "reasoning": "why"}, HI], {}),
    "tools": ([HI], {"tools": [TOOL]}),
    "kwargs": ([HI], {"template_kwargs": {"mood": "glad"}}),
    "no answer": ([HI], {"add_generation_prompt": False}),
    "continued": ([HI, {"role": "assistant", "content": "I"}], {"continue_final_message": True}),
}  # fmt: skip
BAD: dict[str, tuple[Any, dict[str, Any], type[ServiceError], str]] = {
    "no role": ([{"content": "a"}], {}, InvalidRequest, "messages[0].role"),
    "role": ([{"role": "captain", "content": "a"}], {}, InvalidRequest, "messages[0].role"),
    "content": ([HI, {"role": "user"}], {}, InvalidRequest, "messages[1].content"),
    "number": ([{"role": "user", "content": 5}], {}, InvalidRequest, "messages[0].content"),
    "image": (
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}],
        {}, Unsupported, "messages[0].content",
    ),
    "part": (
        [{"role": "user", "content": [{"type": "text"}]}], {}, InvalidRequest,
        "messages[0].content",
    ),
    "call": (
        [{"role": "assistant", "tool_calls": [{"id": "a"}]}], {}, InvalidRequest,
        "messages[0].tool_calls",
    ),
    "a text": ("hi", {}, InvalidRequest, "messages"),
    "no list": (5, {}, InvalidRequest, "messages"),
    "an empty one": ([[]], {}, InvalidRequest, "messages"),
    "tools": ([HI], {"tools": [{"type": "web"}]}, InvalidRequest, "tools[0].type"),
    "two tools": ([HI], {"tools": [TOOL, TOOL]}, InvalidRequest, "tools[1]"),
    "flag": ([HI], {"add_generation_prompt": 1}, InvalidRequest, "add_generation_prompt"),
}  # fmt: skip


def body_of(messages: Any, told: Mapping[str, Any]) -> dict[str, Any]:
    """The same as a client writes it."""
    renamed = {"template_kwargs": "chat_template_kwargs"}
    return {"messages": messages, **{renamed.get(name, name): told[name] for name in told}}


@pytest.fixture
def tokenizer(tmp_path: Path) -> TextTokenizer:
    write_tokenizer(tmp_path / "offline", template=SHOWN)
    return TextTokenizer(tmp_path / "offline")


async def test_prompts_are_those_of_a_server(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    (tmp_path / "shown.jinja").write_text(SHOWN)
    template = str(tmp_path / "shown.jinja")
    seen = set()
    async with stack(tmp_path, chat_template=template) as served, served.http() as client:
        for name, (messages, told) in GOOD.items():
            answer = await client.post("/tokenize", json=body_of(messages, told))
            assert answer.status_code == 200, (name, answer.text)
            (offline,) = as_prompts(messages, tokenizer, **told)
            assert offline.token_ids == answer.json()["tokens"], name
            assert offline.goes_on == bool(told.get("continue_final_message")), name
            seen.add(offline.text)
    assert len(seen) == len(GOOD), "the template shows all there is"


@pytest.mark.parametrize("name", BAD)
def test_errors_are_those_of_a_server(tokenizer: TextTokenizer, name: str) -> None:
    messages, told, kind, param = BAD[name]
    with pytest.raises(ServiceError) as offline:
        as_prompts(messages, tokenizer, **told)
    (wrong,) = messages if messages == [[]] else [messages]
    with pytest.raises(ServiceError) as served:
        to_chat(parse(orjson.dumps(body_of(wrong, told)), ChatBody))
    for caught in (offline, served):
        assert (type(caught.value), caught.value.param) == (kind, param)
    assert offline.value.message == served.value.message


def test_several_conversations(tokenizer: TextTokenizer) -> None:
    one, two = (as_prompts([{**HI, "content": text}], tokenizer)[0] for text in "ab")
    frozen = [(MappingProxyType({**HI, "content": text}),) for text in "ab"]
    assert as_prompts(frozen, tokenizer) == [one, two]
    assert as_prompts([], tokenizer) == []


def test_what_no_template_can_be_asked_for(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    write_tokenizer(tmp_path / "plain")
    plain = TextTokenizer(tmp_path / "plain")
    with pytest.raises(Unsupported, match="has no place for tools"):
        as_prompts([HI], plain, tools=[TOOL])
    endless: dict[str, Any] = {**HI}
    endless["again"] = endless
    with pytest.raises(InvalidRequest, match="more than 128 objects and lists"):
        as_prompts([endless], tokenizer)
    with pytest.raises(TypeError, match="tool_choice"):
        as_prompts([HI], tokenizer, tool_choice="required")  # type: ignore[call-arg]


def test_a_with_block_closes_its_llm() -> None:
    closed: list[str] = []
    for end in ("well", "badly"):
        llm = LLM("demo", executor="simulated", skip_tokenizer_init=True, max_model_len=64)
        close = llm.close
        llm.close = lambda end=end, close=close: (close(), closed.append(end))  # type: ignore[misc]
        try:
            with llm as same:
                assert same is llm
                if end == "badly":
                    raise KeyError(end)
        except KeyError:
            assert end == "badly"
    assert closed == ["well", "badly"]

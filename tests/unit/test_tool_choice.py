"""Which tools an answer may call, as chats and responses say it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from frontend.api.openai_request import parse, to_chat
from frontend.api.openai_schema import ChatBody
from frontend.api.responses_request import to_request
from frontend.api.responses_schema import ResponsesBody
from frontend.request import Chat
from tidemill.runtime.errors import InvalidRequest

NAMES = ("f", "g", "h")


def of_chat(name: object) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def of_response(name: object) -> dict[str, Any]:
    return {"type": "function", "name": name}


def chat_with(choice: object) -> Chat:
    body = {"messages": [{"role": "user", "content": "a"}], "tool_choice": choice}
    asked = {**body, "tools": [of_chat(name) for name in NAMES]}
    (chat,) = to_chat(parse(json.dumps(asked).encode(), ChatBody)).prompts
    assert isinstance(chat, Chat)
    return chat


def response_with(choice: object) -> Chat:
    asked = {"input": "a", "tool_choice": choice, "tools": [of_response(name) for name in NAMES]}
    body = parse(json.dumps(asked).encode(), ResponsesBody)
    (chat,) = to_request(body, ({"role": "user", "content": "a"},)).prompts
    assert isinstance(chat, Chat)
    return chat


def allowing(mode: object, names: list[object]) -> list[Chat]:
    """The same choice in a chat and in a response."""
    nested = {"mode": mode, "tools": [of_chat(name) for name in names]}
    flat = {"mode": mode, "tools": [of_response(name) for name in names]}
    kind = {"type": "allowed_tools"}
    return [chat_with({**kind, "allowed_tools": nested}), response_with({**kind, **flat})]


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_the_model_is_told_of_allowed_tools_alone(mode: str) -> None:
    """Chats refused what OpenAI's take."""
    for chat in allowing(mode, ["h", "f"]):
        assert [tool["function"]["name"] for tool in chat.tools] == ["f", "h"]
        assert (chat.must_call, chat.called) == (mode == "required", "")


@pytest.mark.parametrize(
    ("mode", "names"),
    [("none", ["f"]), (5, ["f"]), (None, ["f"]), ("auto", []), ("auto", ["f", "x"]), ("auto", [5])],
)
def test_what_allows_nothing_is_refused(mode: object, names: list[object]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        allowing(mode, names)
    assert caught.value.param == "tool_choice"


@pytest.mark.parametrize("ask", [chat_with, response_with])
@pytest.mark.parametrize(
    "choice",
    [
        {"type": "web_search", "function": {"name": "f"}, "name": "f"},
        {"type": "allowed_tools"},
        {"type": "allowed_tools", "allowed_tools": 5, "tools": 5},
        {"type": "function"},
        {"type": ["function"], "function": {"name": "f"}, "name": "f"},
        "f",
    ],
)
def test_what_is_no_choice_is_refused(ask: Any, choice: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ask(choice)
    assert caught.value.param == "tool_choice"
    kind = choice["type"] if isinstance(choice, dict) else ""
    assert ("'web_search' are not served" in caught.value.message) == (kind == "web_search")


def test_control_the_other_choices() -> None:
    for chat in (chat_with(of_chat("g")), response_with(of_response("g"))):
        assert (chat.must_call, chat.called, len(chat.tools)) == (True, "g", 3)
    for ask in (chat_with, response_with):
        for choice, told in ((None, 3), ("auto", 3), ("none", 0), ("required", 3)):
            chat = ask(choice)
            assert (len(chat.tools), chat.must_call) == (told, choice == "required")

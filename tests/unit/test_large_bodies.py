"""Bodies of a few MB are read in a time that grows with them, not with their square: one client's
request is read on the event loop that serves everybody."""

import time

import orjson
import pytest

from frontend.api.anthropic_schema import Turn
from frontend.api.anthropic_turns import to_messages
from frontend.api.openai_request import parse
from frontend.api.openai_schema import (
    ChatBody,
    CompletionBody,
    FunctionBody,
    TokenizeBody,
    ToolBody,
)
from frontend.api.openai_tools import with_tools
from frontend.api.responses_schema import ResponsesBody
from frontend.api.responses_tools import with_tools_of
from frontend.api.tool_choice import ToolChoice
from frontend.parsers.tools.qwen3_coder import Qwen3CoderParser
from frontend.request import Chat
from frontend.strict_calls import structures_of
from tidemill.runtime.errors import InvalidRequest, Unsupported

CHAT = Chat(messages=[{"role": "user", "content": "Hi"}])
FEW_S = 2.5
"""Of the CPU; squares take several times as long."""


def test_many_tools_are_compared_in_one_go() -> None:
    function = FunctionBody(name="f")
    tools = [
        ToolBody(type="function", function=function.model_copy(update={"name": f"f{i}"}))
        for i in range(25_000)
    ]
    began = time.process_time()
    chat = with_tools(CHAT, tools, ToolChoice(), parallel=None)
    assert time.process_time() - began < FEW_S
    assert len(chat.tools) == len(tools)


def test_many_allowed_tools_are_found_in_one_go() -> None:
    tools = [{"type": "function", "name": f"f{i}"} for i in range(15_000)]
    choice = {"type": "allowed_tools", "mode": "auto", "tools": tools}
    body = ResponsesBody.model_validate({"input": "Hi", "tools": tools, "tool_choice": choice})
    began = time.process_time()
    assert len(with_tools_of(body, CHAT).tools) == len(tools)
    assert time.process_time() - began < FEW_S


def test_many_turns_of_one_role_are_joined_in_one_go() -> None:
    call = {"type": "tool_use", "id": "a", "name": "f"}
    turns = [Turn(role="assistant", content=[call]) for _ in range(25_000)]
    began = time.process_time()
    said, asked = to_messages([*turns, Turn(role="user", content="Go on")])
    assert time.process_time() - began < FEW_S
    assert len(said["tool_calls"]) == len(turns)
    assert asked == {"role": "user", "content": "Go on"}


def _strict(**parameters: object) -> list[dict[str, object]]:
    return [{"name": "f", "strict": True, "parameters": parameters}]


def test_many_required_parameters_are_found_in_one_go() -> None:
    properties = {f"k{i}": {"type": "string"} for i in range(25_000)}
    asked = _strict(properties=properties, required=list(properties))
    began = time.process_time()
    (structure,) = structures_of(Qwen3CoderParser, asked)
    assert time.process_time() - began < FEW_S
    assert "p24999?" not in structure["lark"]


def test_shared_schemas_are_not_repeated_without_bound() -> None:
    properties = {f"k{i}": {"type": "integer"} for i in range(500)}
    shared = {"long": {"enum": ["y" * 100_000]}}
    with pytest.raises(Unsupported, match="too large to be repeated") as caught:
        structures_of(Qwen3CoderParser, _strict(properties=properties, **{"$defs": shared}))
    assert caught.value.param == "tools[0]"


HI = {"messages": [{"role": "user", "content": "Hi"}]}
FAULTS = {
    "ids": (
        CompletionBody,
        {"prompt": "a", "stop_token_ids": ["x"] * 400_000},
        "stop_token_ids[0]",
    ),
    "tools": (ChatBody, {**HI, "tools": [1] * 400_000}, "tools[0]"),
    "turns": (TokenizeBody, {"messages": [1] * 400_000}, "messages[0]"),
    "names": (ChatBody, {**HI, "decoding": dict.fromkeys(map(str, range(200_000)), 1)}, "decoding"),
    "fields": (ChatBody, {**HI, **dict.fromkeys(map(str, range(200_000)), 1)}, "body"),
    "biases": (
        CompletionBody,
        {"prompt": "a", "logit_bias": dict.fromkeys(map(str, range(200_000)), "x")},
        "logit_bias",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_of_many_faults_one_is_looked_for(name: str) -> None:
    kind, content, param = FAULTS[name]
    body = orjson.dumps(content)
    began = time.process_time()
    with pytest.raises(InvalidRequest) as caught:
        parse(body, kind)
    assert time.process_time() - began < 0.5
    assert caught.value.param == param

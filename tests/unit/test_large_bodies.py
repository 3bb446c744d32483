"""Bodies of a few MB are read in a time that grows with them, not with their square: one client's
request is read on the event loop that serves everybody."""

import time

from frontend.api.anthropic_schema import Turn
from frontend.api.anthropic_turns import to_messages
from frontend.api.openai_schema import FunctionBody, ToolBody
from frontend.api.openai_tools import with_tools
from frontend.api.responses_schema import ResponsesBody
from frontend.api.responses_tools import with_tools_of
from frontend.request import Chat

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
    chat = with_tools(CHAT, tools, None, parallel=None)
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

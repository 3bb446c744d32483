"""Tool calls of earlier turns, which templates expect as objects."""

from __future__ import annotations

import json

import pytest

from frontend.api import grpc_text_convert as convert
from frontend.api.openai_tools import as_object
from frontend.api.responses_schema import InputItem
from frontend.api.responses_turns import to_turns
from tests.unit.test_schema import chat
from tidemill.runtime.errors import InvalidRequest
from tidemill.v1 import text_pb2 as pb


def test_earlier_tool_calls_reach_the_template_as_objects() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "1"},
    ]
    (prompt,) = chat(messages=messages).prompts
    assert prompt.messages[0]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert prompt.messages[1]["tool_call_id"] == "1"


@pytest.mark.parametrize(
    ("cut", "whole"),
    [
        ("", {}),
        ("{", {}),
        ('{"city": "Par', {"city": "Par"}),
        ('{"a": [1, {"b": 2}, tru', {"a": [1, {"b": 2}]}),
        ('{"a": 1, "b": "\\ud83d', {"a": 1, "b": ""}),
    ],
)
def test_a_call_that_was_cut_off_is_read_as_far_as_it_came(cut: str, whole: object) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": cut}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    (prompt,) = chat(messages=messages).prompts
    assert prompt.messages[0]["tool_calls"][0]["function"]["arguments"] == whole


@pytest.mark.parametrize(
    "wrong",
    ["{a}", '{"a": 1} x', '{"a": NaN', "nul", '["a', '{"a": "\\ud800"}', "[1]", '"a"', "5", "null"],
)
def test_arguments_that_are_no_object_are_told_as_they_stand(wrong: str) -> None:
    """A model wrote them, and who was given them and sent them back was refused."""
    told = {"INVALID_JSON": wrong}
    assert read({"name": "f", "arguments": wrong}) == told
    call = {"role": "assistant", "tool_calls": [{"name": "f", "arguments_json": wrong}]}
    user = {"role": "user", "parts": [{"text": "a"}]}
    over_grpc = convert.to_chat_request(pb.ChatRequest(messages=[user, call, user]), {})
    (prompt,) = over_grpc.prompts
    assert prompt.messages[1]["tool_calls"][0]["function"]["arguments"] == told
    item = InputItem(type="function_call", call_id="1", name="f", arguments=wrong)
    (turn,) = to_turns([item], ())
    assert turn["tool_calls"][0]["function"]["arguments"] == told
    assert as_object(json.dumps(told)) == told, "as /v1/messages tells it, and is told it"


@pytest.mark.parametrize("wrong", [[1], [], 0, True])
def test_arguments_of_another_kind_are_refused(wrong: object) -> None:
    with pytest.raises(InvalidRequest, match=r"messages\[0\].tool_calls: arguments are of type"):
        read({"name": "f", "arguments": wrong})
    assert read({"name": "f", "arguments": {"a": 1}}) == {"a": 1}
    assert read({"name": "f", "arguments": None}) == read({"name": "f"}) == {}


@pytest.mark.parametrize("wrong", ["f", None, 5, ["name"]])
def test_what_is_no_call_is_refused(wrong: object) -> None:
    with pytest.raises(InvalidRequest, match=r"messages\[0\].tool_calls: not a tool call"):
        read(wrong)


def read(function: object) -> object:
    call = {"id": "1", "type": "function", "function": function}
    (prompt,) = chat(
        messages=[{"role": "assistant", "content": None, "tool_calls": [call]}]
    ).prompts
    return prompt.messages[0]["tool_calls"][0]["function"]["arguments"]

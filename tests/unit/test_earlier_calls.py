"""Tool calls of earlier turns, which templates expect as objects."""

from __future__ import annotations

import pytest

from tests.unit.test_schema import chat
from tidemill.runtime.errors import InvalidRequest


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
    "wrong", ["{a}", '{"a": 1} x', '{"a": NaN', "nul", '["a', '{"a": "\\ud800"}']
)
def test_arguments_that_are_not_json_are_refused(wrong: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": wrong}}
    with pytest.raises(InvalidRequest, match=r"messages\[0\].tool_calls: not a tool call"):
        chat(messages=[{"role": "assistant", "content": None, "tool_calls": [call]}])

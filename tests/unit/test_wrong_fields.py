"""A refusal names the field that is wrong, deep in lists and where it may be of several types."""

from __future__ import annotations

import json

import pytest

from frontend.api.anthropic_schema import MessagesBody
from frontend.api.embeddings import EmbeddingsBody
from frontend.api.openai_request import parse
from frontend.api.openai_schema import Body, ChatBody
from frontend.api.rerank import RerankBody
from frontend.api.responses_schema import ResponsesBody
from tidemill.runtime.errors import InvalidRequest

SAID = {"role": "user", "content": "a"}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
TEXT_OR_LIST = "Input should be a valid string or a valid list"

CASES: dict[str, tuple[type[Body], dict[str, object], str, str]] = {
    "role of an item": (
        ResponsesBody,
        {"input": [SAID, {**SAID, "role": "critic"}]},
        "input[1].role",
        "Input should be 'user', 'assistant', 'system' or 'developer' (got 'critic')",
    ),
    "output of a call": (
        ResponsesBody,
        {"input": [SAID, CALL, {"type": "function_call_output", "call_id": "c", "output": 5}]},
        "input[2].output",
        f"{TEXT_OR_LIST} (got 5)",
    ),
    "arguments that are no text": (
        ResponsesBody,
        {"input": [{**CALL, "arguments": {"x": 1}}]},
        "input[0].arguments",
        "Input should be a valid string (got {'x': 1})",
    ),
    "no items": (ResponsesBody, {"input": []}, "input", "List should have at least 1 item"),
    "an item in place of a list": (ResponsesBody, {"input": SAID}, "input", TEXT_OR_LIST),
    "one id among texts": (EmbeddingsBody, {"input": ["a", 1]}, "input[1]", "string (got 1)"),
    "an object without its text": (
        RerankBody,
        {"query": "q", "documents": ["a", {"txt": "b"}]},
        "documents[1].text",
        "Field required",
    ),
    "content": (ChatBody, {"messages": [{**SAID, "content": 5}]}, "messages[0].content", "or a v"),
    "a part": (
        MessagesBody,
        {"max_tokens": 5, "messages": [SAID, {**SAID, "content": [{"type": "text"}, "a"]}]},
        "messages[1].content[1]",
        "Input should be a valid dictionary (got 'a')",
    ),
    "the first of two fields": (
        ChatBody,
        {"temperature": "hot", "messages": [SAID], "stop": ["a", 5]},
        "temperature",
        "Input should be a valid number (got 'hot')",
    ),
    "a stop": (ChatBody, {"messages": [SAID], "stop": ["a", 5]}, "stop[1]", "string (got 5)"),
    "a field that is called like a type": (
        ResponsesBody,
        {"input": "a", "metadata": {"str": 5}},
        "metadata.str",
        "Input should be a valid string (got 5)",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_wrong_field_is_named(name: str) -> None:
    kind, fields, param, words = CASES[name]
    with pytest.raises(InvalidRequest) as caught:
        parse(json.dumps(fields).encode(), kind)
    assert caught.value.param == param
    assert caught.value.message.startswith(f"{param}: ")
    assert words in caught.value.message

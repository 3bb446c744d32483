"""JSON inside of texts is nested no more deeply than bodies are, wherever a caller may put it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from frontend.api import grpc_text_convert as convert
from frontend.api.responses_schema import InputItem
from frontend.api.responses_turns import to_turns
from tests.unit.test_schema import chat
from tidemill.nesting import MAX_DEPTH, check_nesting, is_too_deep
from tidemill.runtime.errors import InvalidRequest
from tidemill.v1 import text_pb2 as pb

USER = {"role": "user", "parts": [{"text": "a"}]}


def depth_of(value: Any) -> int:
    """The slow and obvious reference."""
    if not isinstance(value, dict | list):
        return 0
    inner = value.values() if isinstance(value, dict) else value
    return 1 + max((depth_of(one) for one in inner), default=0)


def nested(depth: int, *, within: str = "a") -> str:
    """An object with `depth` levels; brackets in its texts are none."""
    return f'{{"{within}": ' * depth + '"[[{{"' + "}" * depth


def drawn(rng: random.Random, depth: int) -> Any:
    """Of exactly this depth, with shallow things beside."""
    value: Any = rng.choice(["[{", 1, None])
    for _ in range(depth):
        beside = [rng.choice([{"a": [[]]}, [], "}{", 5]) for _ in range(rng.randrange(3))]
        inner = [*beside[:1], value, *beside[1:]]
        value = inner if rng.random() < 0.5 else {str(i): one for i, one in enumerate(inner)}
    return value


def test_depth_is_counted_as_the_reference_counts() -> None:
    rng, seen = random.Random(5), set()
    for _ in range(300):
        value = drawn(rng, rng.randint(MAX_DEPTH - 4, MAX_DEPTH + 2))
        is_deep = depth_of(value) > MAX_DEPTH
        seen.add(is_deep)
        assert is_too_deep(value) == is_deep
        if is_deep:
            with pytest.raises(InvalidRequest, match=f"here has more than {MAX_DEPTH}"):
                check_nesting(json.dumps(value), "here")
        else:
            check_nesting(json.dumps(value), "here")
    assert seen == {True, False}
    check_nesting("{" * 200 + '"', "no JSON")
    with pytest.raises(InvalidRequest):
        check_nesting("[" * 50_000 + "]" * 50_000, "deeper than the parser goes")


def grpc_chat(**fields: Any) -> Callable[[], object]:
    request = pb.ChatRequest(**{"messages": [USER], **fields})
    return lambda: convert.to_chat_request(request, {})


def tool_call(text: str) -> Callable[[], object]:
    called = {"role": "assistant", "tool_calls": [{"name": "f", "arguments_json": text}]}
    return grpc_chat(messages=[USER, called])


def tool(text: str) -> Callable[[], object]:
    return grpc_chat(chat={"tools": [{"name": "f", "parameters_json_schema": text}]})


def item(text: str) -> Callable[[], object]:
    call = InputItem(type="function_call", call_id="1", name="f", arguments=text)
    return lambda: to_turns([call], ())


PLACES: dict[str, Callable[[str], Callable[[], object]]] = {
    "tools[0].parameters_json_schema": tool,
    "messages[1].tool_calls": tool_call,
    "constraint.json_schema": lambda text: grpc_chat(options={"constraint": {"json_schema": text}}),
    "constraint.structural_tag": lambda text: grpc_chat(
        options={"constraint": {"structural_tag": text}}
    ),
    "input[0].arguments": item,
    "guided_json": lambda text: lambda: chat(guided_json=text),
}


@pytest.mark.parametrize("param", PLACES)
def test_every_place_is_bounded(param: str) -> None:
    ask = PLACES[param]
    assert ask(nested(MAX_DEPTH))()
    for depth in (MAX_DEPTH + 1, 400, 3000):
        with pytest.raises(InvalidRequest, match=f"more than {MAX_DEPTH} objects") as caught:
            ask(nested(depth))()
        assert caught.value.param == param

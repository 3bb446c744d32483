"""Reasoning among the items of /v1/responses, which other servers may have sealed."""

from __future__ import annotations

from typing import Any

import pytest

from frontend.api.responses_schema import InputItem
from frontend.api.responses_turns import to_turns
from tidemill.runtime.errors import InvalidRequest


def thoughts(content: Any) -> str | None:
    items = [
        InputItem(type="reasoning", content=content),
        InputItem(role="assistant", content="so"),
    ]
    (turn,) = to_turns(items, ())
    return turn.get("reasoning_content")


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ([{"text": "a"}, {"text": None}, {}, {"text": "b"}], "ab"),
        ([{"type": "reasoning_text", "text": None}], None),
        (None, None),
        ([], None),
        ("a", "a"),
    ],
)
def test_what_was_not_told_is_nothing(content: Any, told: str | None) -> None:
    """It was the word None, which the template showed to the model."""
    assert thoughts(content) == told


@pytest.mark.parametrize("wrong", [5, ["a"], {"a": 1}, False])
def test_what_is_no_text_is_named(wrong: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"it must be a text") as refused:
        thoughts([{"text": "a"}, {"text": wrong}])
    assert refused.value.param == "input[0].content[1].text"

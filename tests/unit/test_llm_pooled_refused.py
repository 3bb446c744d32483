"""What the pooled calls of an LLM are given that is of no kind of theirs is refused by its name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tidemill import LLM
from tidemill.runtime.errors import InvalidRequest

NO_COUNTS: tuple[Any, ...] = (True, "x", 1.5, [], {}, float("nan"))
NO_TEXTS = (None, True, 3, 1.5)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", device="cpu", max_model_len=64, num_pages=16) as made:
        yield made


def refused(call: Callable[[], Any], name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"of type {type(value).__name__}; pass ") as caught:
        call()
    assert caught.value.param == name


@pytest.mark.parametrize("value", NO_COUNTS)
def test_counts(llm: LLM, value: Any) -> None:
    """True was taken for 1, and a text was an error of Python's."""
    name = "truncate_prompt_tokens"
    refused(lambda: llm.embed("a", truncate_prompt_tokens=value), name, value)
    refused(lambda: llm.embed([3, 4], truncate_prompt_tokens=value), name, value)
    refused(lambda: llm.score("a", "b", truncate_prompt_tokens=value), name, value)
    refused(lambda: llm.classify("a", truncate_prompt_tokens=value), name, value)
    refused(lambda: llm.embed("a", dimensions=value), "dimensions", value)


@pytest.mark.parametrize("value", ["no", 0, 1.5, [], {}])
def test_switches_and_words(llm: LLM, value: Any) -> None:
    """`normalize="no"` was taken for True."""
    refused(lambda: llm.embed("a", normalize=value), "normalize", value)
    if not isinstance(value, str):
        refused(lambda: llm.embed("a", pooling=value), "pooling", value)


@pytest.mark.parametrize("value", NO_TEXTS)
def test_texts_of_pairs(llm: LLM, value: Any) -> None:
    refused(lambda: llm.score(value, "a"), "text_1", value)
    refused(lambda: llm.score("a", value), "text_2", value)
    refused(lambda: llm.score("a", ["b", value]), "text_2[1]", value)
    refused(lambda: llm.score([value], "b"), "text_1[0]", value)


def test_bytes_and_mappings_are_no_texts(llm: LLM) -> None:
    """The numbers of the one, and the keys of the other, were."""
    refused(lambda: llm.score(b"x", b"x"), "text_1", b"x")  # type: ignore[arg-type]
    refused(lambda: llm.score("a", {"b": 1}), "text_2", {})  # type: ignore[arg-type]


def test_what_is_of_its_kind_is_taken(llm: LLM) -> None:
    (one,) = llm.embed([3, 4], normalize=False, truncate_prompt_tokens=1, pooling="mean")
    assert one.prompt_token_ids == [3]
    assert len(llm.score("a", ("b", "c"), truncate_prompt_tokens=-1)) == 2

"""Ctrl-C while the prompts of a pooled call are taken back: all of them are."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tidemill.llm import LLM


@pytest.fixture
def heard() -> Iterator[None]:
    """Python raises no KeyboardInterrupt where it was started with the signal ignored, as a shell
    does in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heard")
def test_nothing_of_a_pooled_call_is_left_where_its_end_is_interrupted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with LLM("demo", device="cpu", max_model_len=64, num_pages=32) as llm:
        want, abort, num_told = llm.embed(["a", "b", "c"]), llm._scheduler.abort, 0

        def interrupted(one: Any) -> None:
            nonlocal num_told
            abort(one)
            num_told += 1
            if num_told == 1:
                signal.raise_signal(signal.SIGINT)

        with monkeypatch.context() as patch:
            patch.setattr(llm._scheduler, "abort", interrupted)
            with pytest.raises(KeyboardInterrupt):
                llm.embed(["a", "b", "c"])
        assert num_told == 3
        assert llm._pooled == {}
        assert llm.embed(["a", "b", "c"]) == want

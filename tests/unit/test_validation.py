"""Prompts of token ids against the context, before a look at each id."""

from __future__ import annotations

import pytest

from frontend.request import Options, Sampling, TextRequest
from frontend.validation import check_request
from tests.engine_facts import FACTS
from tidemill.runtime.errors import InvalidRequest


def check(prompt: tuple[int, ...], **fields: object) -> None:
    options = Options(sampling=Sampling(max_tokens=4), **fields)  # type: ignore[arg-type]
    check_request(TextRequest(prompts=(prompt,), options=options), FACTS, max_n=1)


@pytest.mark.parametrize("length", [32, 100_000])
def test_ids_of_a_prompt_that_is_too_long_are_not_looked_at(length: int) -> None:
    """20 million of them held everybody's event loop for 1.5 s."""
    with pytest.raises(InvalidRequest, match=f"resulted in {length} tokens") as caught:
        check((999,) * length)
    assert (caught.value.reason, caught.value.param) == ("CONTEXT_LENGTH_EXCEEDED", "prompt")


def test_ids_that_are_cut_off_are_not_looked_at() -> None:
    check((999,) * 40 + (5,) * 20, truncate_prompt_tokens=20)
    check((5,) * 20 + (999,) * 40, truncate_prompt_tokens=20, truncation_side="right")
    with pytest.raises(InvalidRequest, match="resulted in 40 tokens"):
        check((999,) * 60, truncate_prompt_tokens=40)


def test_control_ids_of_a_prompt_that_fits_are_looked_at() -> None:
    check((5,) * 31)
    with pytest.raises(InvalidRequest, match="token id 999; ids of this model"):
        check((5,) * 30 + (999,))
    with pytest.raises(InvalidRequest, match="token id 999; ids of this model"):
        check((5,) * 40 + (999,), truncate_prompt_tokens=20)

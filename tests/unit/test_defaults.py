"""Sampling defaults of a checkpoint, and what cannot be one."""

from __future__ import annotations

from typing import Any

import pytest

from engine_service.core.params import SamplingParams
from engine_service.defaults import read_sampling
from tidemill.runtime.errors import InvalidRequest


def test_numbers_are_taken_in_either_spelling() -> None:
    said = {"temperature": 1, "top_k": 20.0, "max_new_tokens": 64, "top_p": None, "do_sample": True}
    assert read_sampling(said) == SamplingParams(temperature=1.0, top_k=20, max_tokens=64)
    assert read_sampling({}) == SamplingParams()


@pytest.mark.parametrize("value", ["high", [0.7], True, 10**400, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["temperature", "top_k", "max_new_tokens"])
def test_what_is_no_number_is_refused_by_name(name: str, value: Any) -> None:
    """A start ended with an error of Python's, or every request with one about a value that its
    caller had not given."""
    with pytest.raises(
        InvalidRequest, match=r"generation_config\.json: .*--generation-config none"
    ):
        read_sampling({name: value})

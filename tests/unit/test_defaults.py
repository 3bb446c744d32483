"""Sampling defaults of a checkpoint, and what cannot be one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine_service.composition import compose
from engine_service.config import EngineConfig
from engine_service.core.params import SamplingParams
from engine_service.defaults import read_sampling, sampling_defaults
from tests.unit.test_weights import random_tensors, write
from tidemill import LLM
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


SEVERAL: dict[str, Any] = {"tensor_parallel_size": 2}


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("top_p", 0, r"in \(0, 1\]"),
        ("top_p", 5, r"in \(0, 1\]"),
        ("temperature", -1, "0 \\(greedy\\) or at least 9e-6"),
        ("top_k", -7, "a whole number at least -1"),
        ("top_k", 20.5, "a whole number at least -1"),
        ("min_p", 2, r"in \[0, 1\]"),
        ("repetition_penalty", 0, "above 0"),
        ("max_new_tokens", -1, "a whole number at least 1"),
    ],
)
def test_what_no_request_may_say_is_refused_at_the_start(
    tmp_path: Path, seed: int, name: str, value: float, allowed: str
) -> None:
    """Every request that said nothing was refused by a parameter that it had not sent."""
    write(tmp_path, random_tensors(seed))
    (tmp_path / "generation_config.json").write_text(json.dumps({name: value, "do_sample": True}))
    words = rf"^generation_config\.json: {name} is {value}; it must be {allowed}.*correct it, or"
    for how in ({"executor": "simulated"}, {}, SEVERAL):
        config = EngineConfig(model=str(tmp_path), device="cpu", **how)
        stages: list[str] = []
        with pytest.raises(InvalidRequest, match=words) as refused:
            compose(config, lambda stage, *_, told=stages: told.append(stage))
        assert refused.value.param == name
        assert not {"weights", "kernels"} & set(stages)
    with pytest.raises(InvalidRequest, match=words):
        LLM(str(tmp_path), device="cpu", skip_tokenizer_init=True)


def test_what_switches_off_is_no_fault() -> None:
    said = {"temperature": 0, "top_k": 0, "top_p": 1, "min_p": 0.0, "repetition_penalty": 1}
    want = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0)
    assert read_sampling(said) == want
    assert read_sampling({"top_k": -1}) == SamplingParams(top_k=-1)


def test_what_says_how_to_draw_is_left_out_of_a_file_that_draws_nothing() -> None:
    """transformers reads none of it beside `do_sample` false, and such files serve well there."""
    said = {"do_sample": False, "temperature": -1, "top_p": 0, "top_k": -7, "min_p": 2}
    assert read_sampling(said) == SamplingParams()
    assert read_sampling({**said, "top_p": 0.5}) == SamplingParams(top_p=0.5)
    with pytest.raises(InvalidRequest, match="repetition_penalty is 0"):
        read_sampling({"do_sample": False, "repetition_penalty": 0})


def test_an_operator_may_want_nothing_of_the_file() -> None:
    assert sampling_defaults(EngineConfig(generation_config="none"), {"top_p": 5}) == (
        SamplingParams()
    )

"""Parameters of the wrong kind are refused where they are written, by name."""

import re
from dataclasses import fields
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from tidemill import BeamSearchParams, SamplingParams
from tidemill.sampling_params import SparseParams, StructuredOutputsParams

WRONG: list[tuple[str, Any, str]] = [
    ("temperature", "0.5", "'0.5', of type str; pass a number or None"),
    ("temperature", True, "True, of type bool; pass a number or None"),
    ("top_p", [0.5], "[0.5], of type list; pass a number or None"),
    ("min_p", 10**400, f"1{'0' * 59}..., of type int; pass a number or None"),
    ("max_tokens", 3.5, "3.5, of type float; pass an integer or None"),
    ("max_tokens", 3.0, "3.0, of type float; pass an integer or None"),
    ("max_tokens", True, "True, of type bool; pass an integer or None"),
    ("n", "2", "'2', of type str; pass an integer"),
    ("n", None, "None, of type NoneType; pass an integer"),
    ("n", 1j, "1j, of type complex; pass an integer"),
    ("stop", 5, "5, of type int; pass a text or a list of texts or None"),
    ("stop", ["a", 5], "['a', 5], of type list; pass a text or a list of texts or None"),
    ("stop", b"a", "b'a', of type bytes; pass a text or a list of texts or None"),
    ("bad_words", "word", "'word', of type str; pass a list of texts"),
    ("stop_token_ids", 5, "5, of type int; pass a list of integers"),
    ("stop_token_ids", [5, "6"], "[5, '6'], of type list; pass a list of integers"),
    ("allowed_token_ids", [True], "[True], of type list; pass a list of integers"),
    ("logit_bias", {"5": 1.0}, "{'5': 1.0}, of type dict; pass a mapping of integers to numbers"),
    ("logit_bias", {5: "1"}, "{5: '1'}, of type dict; pass a mapping of integers to numbers"),
    ("logit_bias", [5], "[5], of type list; pass a mapping of integers to numbers"),
    ("method_params", {1: 2}, "{1: 2}, of type dict; pass a mapping of texts"),
    ("ignore_eos", 1, "1, of type int; pass True or False"),
    ("ignore_eos", "false", "'false', of type str; pass True or False"),
    ("sparse", {}, "{}, of type dict; pass a SparseParams or None"),
    ("structured_outputs", "a+", "'a+', of type str; pass a StructuredOutputsParams or None"),
    ("truncation_side", None, "None, of type NoneType; pass a text"),
    ("method", 7, "7, of type int; pass a text or None"),
    ("seed", "s" * 99, f"'{'s' * 59}..., of type str; pass an integer or None"),
]


@pytest.mark.parametrize(("name", "value", "said"), WRONG)
def test_another_kind_is_refused(name: str, value: Any, said: str) -> None:
    with pytest.raises(TypeError, match=f"^SamplingParams: {name} is {re.escape(said)}$"):
        SamplingParams(**{name: value})


def test_none_is_an_empty_list_or_mapping() -> None:
    names = ("stop_token_ids", "bad_words", "logit_bias", "allowed_token_ids", "method_params")
    assert SamplingParams(**dict.fromkeys(names)) == SamplingParams()


def test_nothing_but_the_wrong_kind_is_refused() -> None:
    """Each field takes its default and what is of its kind; a value is for the engine to judge."""
    assert SamplingParams(**{one.name: getattr(SamplingParams(), one.name) for one in
                             fields(SamplingParams)}) == SamplingParams()  # fmt: skip
    given: dict[str, Any] = {
        "temperature": 1, "top_p": -3.5, "n": -1, "seed": 1 << 80, "stop": ("a", "b"),
        "stop_token_ids": range(3), "bad_words": {"one"}, "logit_bias": {5: 1},
        "method_params": MappingProxyType({"any": [object]}), "sparse": SparseParams(),
        "structured_outputs": StructuredOutputsParams(regex="a"), "truncation_side": "middle",
    }  # fmt: skip
    made = SamplingParams(**given)
    assert made.stop_strings == ("a", "b")
    assert (made.stop_token_ids, made.bad_words) == ([0, 1, 2], ["one"])
    assert (made.temperature, type(made.temperature)) == (1.0, float)
    for name in ("top_p", "n", "seed", "sparse", "structured_outputs", "truncation_side"):
        assert getattr(made, name) == given[name]


def test_scalars_of_numpy_become_plain_ones() -> None:
    made = SamplingParams(
        temperature=np.float32(0.5),
        top_p=np.float64(0.25),
        max_tokens=np.int64(3),
        n=np.uint8(2),
        ignore_eos=np.bool_(True),
        stop_token_ids=[np.int32(4)],
        logit_bias={np.int64(5): np.float32(1.5)},
    )
    plain = SamplingParams(temperature=0.5, top_p=0.25, max_tokens=3, n=2, ignore_eos=True,
                           stop_token_ids=[4], logit_bias={5: 1.5})  # fmt: skip
    assert made == plain
    for one in fields(made):
        assert type(getattr(made, one.name)) is type(getattr(plain, one.name)), one.name
    assert list(map(type, made.stop_token_ids)) == [int]
    assert [*map(type, made.logit_bias)] == [int]
    for wrong in (
        {"max_tokens": np.float32(3)},
        {"n": np.bool_(True)},
        {"temperature": np.ones(1)},
    ):
        with pytest.raises(TypeError, match=next(iter(wrong))):
            SamplingParams(**wrong)


def test_a_beam_search_is_checked_too() -> None:
    with pytest.raises(TypeError, match="BeamSearchParams: beam_width is '4', of type str"):
        BeamSearchParams(beam_width="4", max_tokens=3)  # type: ignore[arg-type]
    made = BeamSearchParams(beam_width=np.int64(4), max_tokens=3, length_penalty=1)  # type: ignore[arg-type]
    assert (type(made.beam_width), made.length_penalty) == (int, 1.0)

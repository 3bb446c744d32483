"""Keywords of LLM: values that no flag could have had are named before anything is loaded."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine_service.config import EngineConfig
from tidemill import LLM
from tidemill.keywords import engine_config
from tidemill.runtime.errors import InvalidRequest, Unsupported


@pytest.mark.parametrize(
    ("name", "value"),
    [("dtype", "fp16"), ("dtype", 5), ("load_format", None), ("attention_backend", "FLASH")],
)
def test_unknown_words_are_refused_with_those_that_there_are(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"{name} is {value!r}; it must be one of auto, ") as e:
        LLM("demo", **{name: value})
    assert e.value.param == name


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("prefix_caching", "no", "True or False"),
        ("seed", "x", "an integer"),
        ("page_size", "16", "an integer or None"),
        ("max_model_len", 1.5, "an integer or None"),
        ("tensor_parallel_size", "2", "an integer"),
        ("memory_fraction", "0.5", "a number"),
        ("model", 3, "a text"),
        ("device", 0, "a text"),
        ("device", None, "a text"),
        ("tokenizer", True, "a text or None"),
        ("revision", 1.5, "a text or None"),
        ("default_method", (), "a text or None"),
        ("default_params", 3, "a mapping of texts"),
        ("skip_tokenizer_init", "no", "True or False"),
    ],
)
def test_values_of_another_kind_are_named(name: str, value: Any, words: str) -> None:
    told = rf"LLM\(\): {name} is {re.escape(repr(value))}, of type \w+; pass {words}$"
    with pytest.raises(TypeError, match=told):
        LLM(**{"model": "demo", name: value})


@pytest.mark.parametrize("name", ["page_size", "num_pages", "max_rows"])
def test_sizes_that_nothing_counts_are_refused(name: str) -> None:
    """They were an error of torch's."""
    sizes: dict[str, Any] = {name: 10**30}
    with pytest.raises(InvalidRequest, match=f"{name} 10+ is more than 2147483647 .*; pass") as e:
        LLM("demo", device="cpu", **sizes)
    assert e.value.param == name


def test_a_path_is_a_text() -> None:
    folder = Path("nowhere")
    made = engine_config(folder, {"tokenizer": folder})  # type: ignore[arg-type]
    assert (made.model, made.tokenizer) == (folder, folder)


def test_numbers_of_other_libraries_are_plain_ones() -> None:
    made = engine_config("demo", {"seed": np.int64(3), "max_model_len": None, "dtype": "auto"})
    assert (type(made.seed), made.seed, made.max_model_len, made.dtype) == (int, 3, None, "auto")


@pytest.mark.parametrize(
    ("name", "value"),
    [("host", "0.0.0.0"), ("role", "decode"), ("metrics_port", 9000), ("otlp_endpoint", "x:4317")],
)
def test_what_only_a_service_has_is_refused(name: str, value: Any) -> None:
    with pytest.raises(Unsupported, match=f"{name} is of the engine service.*tidemill serve") as e:
        LLM("demo", **{name: value})
    assert e.value.param == name
    usual = {name: getattr(EngineConfig(), name)}
    assert engine_config("demo", usual) == engine_config("demo", {})

"""What bodies of the Open Inference Protocol say of the bytes that stand behind them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from frontend.api.oip_body import LENGTH_HEADER, Read, read_infer
from tidemill.runtime.errors import InvalidRequest

RAW = b"\x02\0\0\0ab"


def read(*, size: Any = None, wanted: Any = None, all_wanted: Any = None) -> Read:
    tensor = {"name": "text_input", "datatype": "BYTES", "shape": [1]}
    text = {"data": ["ab"]} if size is None else {"parameters": {"binary_data_size": size}}
    output = {"name": "text_output", "parameters": {"binary_data": wanted}}
    fields = {
        "inputs": [tensor | text],
        "outputs": [output],
        "parameters": {"binary_data_output": all_wanted},
    }
    head = json.dumps(fields).encode()
    raw = b"" if size is None else RAW
    return read_infer(head + raw, {LENGTH_HEADER: str(len(head))})


@pytest.mark.parametrize("size", [True, False, 6.0, "6", [6], 7, -1, 10**15])
def test_a_size_is_a_whole_number_of_the_bytes_that_are_there(size: Any) -> None:
    """True was one byte, and the error was of what that byte is."""
    with pytest.raises(InvalidRequest, match=r"it must be a whole number, and 6 bytes") as refused:
        read(size=size)
    assert refused.value.param == "binary_data_size"
    assert read(size=6).tensors[0].values == [b"ab"], "the control"


@pytest.mark.parametrize("value", ["false", "no", 2, [], {}])
def test_whether_bytes_are_wanted_is_true_or_false(value: Any) -> None:
    """Whatever is not empty was true, and so was a text that says the contrary."""
    for name, field in (("binary_data", "wanted"), ("binary_data_output", "all_wanted")):
        with pytest.raises(InvalidRequest, match="it is true or false") as refused:
            read(**{field: value})
        assert refused.value.param == name


def test_an_output_says_it_for_itself() -> None:
    both = frozenset({"text_output"})
    assert read(all_wanted=True).binary == read(wanted=True).binary == both
    assert read(wanted=False, all_wanted=True).binary == read().binary == frozenset()

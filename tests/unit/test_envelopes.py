"""Failures in the words of the API that they are told to."""

from __future__ import annotations

import pytest

from frontend.api.envelopes import error_body
from tidemill.runtime.errors import Unsupported


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_canvases_are_refused_by_the_name_that_was_written(path: str) -> None:
    """As a client of OpenAI's APIs knows no emit_canvas; other parameters keep their names."""
    refused = Unsupported("The method does not support emit_canvas.", param="emit_canvas")
    told = error_body(refused, path)["error"]
    assert told["param"] == "stream_options.include_canvas"
    assert told["message"] == "The method does not support stream_options.include_canvas."
    other = error_body(Unsupported("no logprobs", param="logprobs"), path)["error"]
    assert (other["param"], other["message"]) == ("logprobs", "no logprobs")

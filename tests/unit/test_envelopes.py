"""Failures in the words of the API that they are told to."""

from __future__ import annotations

import orjson
import pytest

from frontend.api.envelopes import error_body
from tidemill.runtime.errors import InvalidRequest, NotFound, Unsupported


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_canvases_are_refused_by_the_name_that_was_written(path: str) -> None:
    """As a client of OpenAI's APIs knows no emit_canvas; other parameters keep their names."""
    refused = Unsupported("The method does not support emit_canvas.", param="emit_canvas")
    told = error_body(refused, path)["error"]
    assert told["param"] == "stream_options.include_canvas"
    assert told["message"] == "The method does not support stream_options.include_canvas."
    other = error_body(Unsupported("no logprobs", param="logprobs"), path)["error"]
    assert (other["param"], other["message"]) == ("logprobs", "no logprobs")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v2/models/demo/infer"])
def test_what_a_client_sent_is_not_repeated_at_any_length(path: str) -> None:
    sent = "\0" * 1_000_000
    error = NotFound(f"The model {sent!r} does not exist.", param="model")
    assert len(orjson.dumps(error_body(error, path))) < 2048
    assert b"The model" in orjson.dumps(error_body(error, path))
    assert len(orjson.dumps(error_body(InvalidRequest("no", param=sent), path))) < 2048

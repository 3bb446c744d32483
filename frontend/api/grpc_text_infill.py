"""InfillRequest as a request of the frontend. It does not know how a gap is filled."""

from __future__ import annotations

from dataclasses import replace

from frontend.api.grpc_text_convert import Metadata, to_options
from frontend.request import TextRequest
from tidemill.runtime.errors import InvalidRequest, Unsupported
from tidemill.v1 import text_pb2


def to_infill_request(request: text_pb2.InfillRequest, metadata: Metadata) -> TextRequest:
    """One gap of `gap_tokens` between `prefix` and `suffix`.

    Raises Unsupported for options that its answer has no place for, and InvalidRequest for a gap
    or a suffix that is empty.
    """
    options = to_options(request.options, metadata)
    for name, is_wanted, use in (
        ("n", options.n > 1, "Generate with a suffix"),
        ("logprobs.top", options.logprobs is not None, "Generate with a suffix"),
        ("logprobs.prompt_top", options.prompt_logprobs is not None, "Generate with a suffix"),
        ("return_token_ids", request.options.return_token_ids, "Generate with a suffix"),
        ("emit_canvas", options.emit_canvas, "GenerateStream with a suffix"),
        ("max_tokens", options.sampling.max_tokens is not None, "gap_tokens"),
    ):
        if is_wanted:
            raise Unsupported(f"{name} is not served by Infill; use {use}", param=name)
    if not request.suffix:
        raise InvalidRequest(
            "suffix is empty; Infill fills the gap before a suffix: send one, or use Generate",
            param="suffix",
        )
    if not 1 <= request.gap_tokens < 2**31:
        raise InvalidRequest(
            f"gap_tokens is {request.gap_tokens}; it must lie in 1..{2**31 - 1}", param="gap_tokens"
        )
    sampling = replace(options.sampling, max_tokens=request.gap_tokens)
    return TextRequest(
        prompts=(request.prefix,),
        options=replace(options, sampling=sampling),
        suffix=request.suffix,
        prompt_param="prefix",
        names={"max_tokens": "gap_tokens"},
    )

"""How each API words a failure. It does not know how answers are sent."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from tidemill.runtime.errors import ServiceError
from tidemill.runtime.rpc import in_short

ANTHROPIC_PATH = "/v1/messages"
OIP_PATHS = ("/v2/models/", "/v2/health/")
_OVERFLOW = "CONTEXT_LENGTH_EXCEEDED"
"""Programs that shorten a conversation and try again know it by the text of the message alone."""
_CANVAS, _CANVAS_HERE = "emit_canvas", "stream_options.include_canvas"
"""What the engine and gRPC call the wish for canvases, and what OpenAI's clients write for it."""
_ANTHROPIC_TYPES = MappingProxyType(
    {
        400: "invalid_request_error",
        401: "authentication_error",
        404: "not_found_error",
        405: "invalid_request_error",
        413: "request_too_large",
        415: "invalid_request_error",
        429: "rate_limit_error",
        503: "overloaded_error",
        504: "timeout_error",
    }
)
"""By HTTP status; everything else is an api_error."""


def is_anthropic(path: str) -> bool:
    """Whether the clients of `path` are Anthropic's."""
    return path == ANTHROPIC_PATH or path.startswith(f"{ANTHROPIC_PATH}/")


def error_body(error: ServiceError, path: str) -> dict[str, Any]:
    """The error object that clients of `path` read."""
    if is_anthropic(path):
        return anthropic_error(error)
    if path.startswith(OIP_PATHS):
        return oip_error(error)
    return openai_error(error)


def oip_error(error: ServiceError) -> dict[str, Any]:
    """The Open Inference Protocol's: a text, and beside it what programs want to know."""
    message, param = _told(error)
    return {"error": message, "code": error.reason.lower(), "param": param}


def openai_error(error: ServiceError) -> dict[str, Any]:
    """OpenAI's error object; numeric facts (n_ctx, n_prompt_tokens) stand beside its fields."""
    facts = {name: int(text) for name, text in error.facts.items() if text.isdecimal()}
    code, (message, param) = error.reason.lower(), _told(error)
    if param == _CANVAS:
        message, param = message.replace(_CANVAS, _CANVAS_HERE), _CANVAS_HERE
    if error.reason == _OVERFLOW:  # OpenAI's SDK leaves the code out of its exceptions' texts
        message = f"{message} ({code})"
    return {
        "error": {
            "message": message,
            "type": error.http_type,
            "param": param,
            "code": code,
            **facts,
        }
    }


def anthropic_error(error: ServiceError) -> dict[str, Any]:
    """Anthropic's error object. It has no field for the parameter, so the message names it."""
    message, param = _told(error)
    if error.reason == _OVERFLOW and error.facts:
        message = _overflow(error.facts)
    elif param is not None and param not in message:
        message = f"{param}: {message}"
    kind = _ANTHROPIC_TYPES.get(error.http_status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def _told(error: ServiceError) -> tuple[str, str | None]:
    """Message and parameter, as short as over gRPC: they may repeat what a client sent, which is
    megabytes where it sent megabytes, five times that where it is written with escapes."""
    message, param, _ = in_short(error)
    return message, None if error.param is None else param


def _overflow(facts: Mapping[str, str]) -> str:
    """Anthropic's words; Claude Code reads the numbers out of them."""
    prompt, asked, limit = (
        int(facts.get(name, 0)) for name in ("n_prompt_tokens", "n_completion_tokens", "n_ctx")
    )
    if prompt >= limit:
        return f"prompt is too long: {prompt} tokens > {limit} maximum"
    return (
        f"input length and `max_tokens` exceed context limit: {prompt} + {asked} > {limit}, "
        "decrease input length or `max_tokens` and try again"
    )

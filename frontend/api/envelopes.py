"""How each API words a failure. It does not know how answers are sent."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from tidemill.runtime.errors import ServiceError

ANTHROPIC_PATH = "/v1/messages"
_ANTHROPIC_TYPES = MappingProxyType(
    {
        400: "invalid_request_error",
        404: "not_found_error",
        405: "invalid_request_error",
        413: "request_too_large",
        429: "rate_limit_error",
        503: "overloaded_error",
        504: "timeout_error",
    }
)
"""By HTTP status; everything else is an api_error."""


def error_body(error: ServiceError, path: str) -> dict[str, Any]:
    """The error object that clients of `path` read."""
    if path == ANTHROPIC_PATH or path.startswith(f"{ANTHROPIC_PATH}/"):
        return anthropic_error(error)
    return openai_error(error)


def openai_error(error: ServiceError) -> dict[str, Any]:
    """OpenAI's error object; numeric facts (n_ctx, n_prompt_tokens) stand beside its fields."""
    facts = {name: int(text) for name, text in error.facts.items() if text.isdecimal()}
    return {
        "error": {
            "message": error.message,
            "type": error.http_type,
            "param": error.param,
            "code": error.reason.lower(),
            **facts,
        }
    }


def anthropic_error(error: ServiceError) -> dict[str, Any]:
    """Anthropic's error object. It has no field for the parameter, so the message names it."""
    message, param = error.message, error.param
    if param is not None and param not in message:
        message = f"{param}: {message}"
    kind = _ANTHROPIC_TYPES.get(error.http_status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}

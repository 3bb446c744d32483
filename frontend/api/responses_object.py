"""The response object of /v1/responses, while it is written and afterwards. Plain dicts for orjson.

It does not know how it is delivered.
"""

from __future__ import annotations

import time
from typing import Any

from frontend.api.finished import check_finished
from frontend.api.responses_items import Emit, Items
from frontend.api.responses_schema import ResponsesBody, ResponsesTool
from frontend.messages import Usage
from frontend.text_delta import TextDelta
from tidemill.runtime.errors import ServiceError

_CODES = {429: "rate_limit_exceeded", 400: "invalid_prompt"}
"""OpenAI's words for failures, by HTTP status; everything else is a server_error."""


def _nobody(kind: str, **content: Any) -> bytes:
    return b""


class Draft:
    """One response of one text. `status` is OpenAI's: queued, in_progress, and then for good
    completed, incomplete, failed or cancelled."""

    def __init__(self, body: ResponsesBody, name: str, created: int, model_name: str) -> None:
        """`name` is the response's id, `created` in seconds since the epoch."""
        self.name = name
        self.suffix = name.partition("_")[2]
        custom = {tool.name for tool in body.tools or () if tool.type == "custom"}
        self.items = Items(self.suffix, custom)
        self.status = "queued" if body.background else "in_progress"
        self._head = {"id": name, "object": "response", "created_at": created, "model": model_name}
        self._asked = _echo(body)
        self._error: dict[str, str] | None = None
        self._usage: dict[str, Any] | None = None
        self._completed: int | None = None

    @property
    def is_settled(self) -> bool:
        """Whether nothing will change any more."""
        return self.status not in ("queued", "in_progress")

    def feed(self, delta: TextDelta, usage: Usage, emit: Emit = _nobody) -> bytes:
        """Adds what is new; returns the events that tell it. `usage` counts up to now.

        Raises ServiceError when the engine could not finish the text.
        """
        events = self.items.feed(delta, emit)
        if delta.finish_reason is None:
            return events
        check_finished(delta.finish_reason)
        status = "incomplete" if delta.finish_reason == "length" else "completed"
        events += self.items.close(status, emit)
        self.status = status
        if status == "completed":
            self._completed = int(time.time())
        self._usage = _usage_of(usage)
        return events

    def fail(self, error: ServiceError) -> None:
        """It will not be finished; what was written stays, in an incomplete item."""
        self._cut("failed")
        code = _CODES.get(error.http_status, "server_error")
        self._error = {"code": code, "message": error.message}

    def cancel(self) -> None:
        """The client does not want it any more."""
        self._cut("cancelled")

    def _cut(self, status: str) -> None:
        if self.items.output:
            self.items.close("incomplete", _nobody)
        self.status = status

    def to_json(self) -> dict[str, Any]:
        """The object; its output is empty until it is settled."""
        is_cut = self.status == "incomplete"
        return {
            **self._head,
            **self._asked,
            "status": self.status,
            "completed_at": self._completed,
            "error": self._error,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": self.items.output if self.is_settled else [],
            "usage": self._usage,
        }


def _echo(body: ResponsesBody) -> dict[str, Any]:
    """What was asked for, and OpenAI's defaults of what cannot be asked for."""
    return {
        "background": bool(body.background),
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": body.store is not False,
        "temperature": body.temperature,
        "text": {"format": _format_of(body), "verbosity": "medium"},
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "tools": [_tool(one) for one in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": body.top_p,
        "truncation": "disabled",
        "user": body.user,
    }


def _tool(given: ResponsesTool) -> dict[str, Any]:
    """With what tools of its type have."""
    others = {"parameters", "strict"} if given.type == "custom" else {"format"}
    return given.model_dump(exclude=others)


def _format_of(body: ResponsesBody) -> dict[str, Any]:
    return (body.text and body.text.format) or {"type": "text"}


def _usage_of(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {
            "reasoning_tokens": usage.reasoning_tokens,
            "forward_passes": usage.forward_passes,
            "denoise_steps": usage.denoise_steps,
            "tokens_per_forward": round(usage.tokens_per_forward, 3),
        },
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
    }

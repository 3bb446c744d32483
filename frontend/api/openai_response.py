"""Pieces of OpenAI responses that chat and text completions share. Plain dicts for orjson."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from frontend.messages import Usage
from frontend.served import ServedModel
from frontend.text_delta import TextDelta, TextLogprob

_LOWEST = -9999.0
"""JSON has no minus infinity."""


def usage_of(usage: Usage) -> dict[str, Any]:
    """The usage object; cached tokens are always shown, 0 included."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {
            "reasoning_tokens": usage.reasoning_tokens,
            "forward_passes": usage.forward_passes,
            "denoise_steps": usage.denoise_steps,
            "tokens_per_forward": round(usage.tokens_per_forward, 3),
        },
    }


def chat_logprobs(entries: Sequence[TextLogprob]) -> dict[str, Any]:
    """`logprobs` of a chat choice."""
    content = [{**_chat_entry(e), "top_logprobs": [_chat_entry(o) for o in e.top]} for e in entries]
    return {"content": content, "refusal": None}


def completion_logprobs(entries: Sequence[TextLogprob]) -> dict[str, Any]:
    """`logprobs` of a completion choice."""
    return {
        "tokens": [_name_of(entry) for entry in entries],
        "token_logprobs": [value_of(entry) for entry in entries],
        "top_logprobs": [
            None
            if entry.logprob is None
            else {_name_of(other): value_of(other) for other in (*entry.top, entry)}
            for entry in entries
        ],
        "text_offset": [entry.offset for entry in entries],
    }


def prompt_logprobs(entries: Sequence[TextLogprob]) -> list[dict[str, Any] | None]:
    """Scores of a prompt by position, keyed by token id; null for the first one."""
    return [
        None
        if entry.logprob is None
        else {str(o.token_id): _scored(o) for o in (entry, *entry.top)}
        for entry in entries
    ]


def value_of(entry: TextLogprob) -> float | None:
    """A log-probability that JSON can carry."""
    return None if entry.logprob is None else max(entry.logprob, _LOWEST)


def canvas_of(delta: TextDelta, model: ServedModel, start: int) -> dict[str, Any]:
    """The tentative state of a diffusion block, behind `start` tokens of its choice; undecided
    positions read as a light shade."""
    canvas = delta.canvas
    assert canvas is not None, "a delta without a canvas"
    return {
        "index": delta.index,
        "block": canvas.block,
        "step": canvas.step,
        "start": start,
        "token_ids": canvas.token_ids,
        "fixed": canvas.fixed,
        "confidence": [round(sure, 4) for sure in canvas.confidence],
        "text": canvas_text(delta, model),
    }


def canvas_text(delta: TextDelta, model: ServedModel) -> str:
    """The text of a tentative block, token by token."""
    canvas, mask = delta.canvas, model.facts.mask_token_id
    assert canvas is not None, "a delta without a canvas"
    piece = model.tokenizer.piece
    return "".join("\u2591" if i == mask else piece(i).text for i in canvas.token_ids)


def _name_of(entry: TextLogprob) -> str:
    """The token's text; half a character has none, so its bytes name it, as OpenAI writes them."""
    try:
        entry.content.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in entry.content)
    return entry.token


def _chat_entry(entry: TextLogprob) -> dict[str, Any]:
    return {"token": entry.token, "logprob": value_of(entry), "bytes": list(entry.content)}


def _scored(entry: TextLogprob) -> dict[str, Any]:
    return {"logprob": value_of(entry), "rank": entry.rank, "decoded_token": entry.token}

"""The messages that TextService answers with: whole, or in the pieces of a stream.

It does not know calls; what is made here is written by grpc_text.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from frontend.api import grpc_text_convert as convert
from frontend.api.grpc_text_tools import call_messages
from frontend.api.openai_response import canvas_text
from frontend.generation import Generation
from frontend.prompt_scores import PromptScores
from frontend.request import TextRequest
from frontend.result import ChoiceResult
from frontend.text_delta import TextDelta
from tidemill.v1 import text_pb2 as pb


class Form(NamedTuple):
    """What tells completions and chats apart on the wire.

    `text_of` is the part of a message that holds the text of a piece.
    """

    prefix: str
    to_request: Callable[[Any, Any], TextRequest]
    to_choice: Callable[[TextDelta | ChoiceResult, Any], Any]
    text_of: Callable[[Any], Any]
    whole: Any
    piece: Any


class Pieces:
    """Makes the messages of one stream; `options` are those of the contract.

    Most of them say a bit of text and nothing else. Those of a choice are one message of which only
    the text is new, so each is to be written before the next one is asked for.
    """

    def __init__(
        self,
        form: Form,
        frame: dict[str, Any],
        generation: Generation,
        wanted: TextRequest,
        options: Any,
    ) -> None:
        self._form = form
        self._frame = frame
        self._model = generation.model
        self._options = options
        self._scores = PromptScores(generation.choices, wanted)
        self._prompt_ids = prompt_ids_of(generation, options)
        self._plain: dict[int, tuple[Any, Any]] = {}
        """By choice: the message of its pieces of text, and what of it holds the text."""

    def make(self, delta: TextDelta) -> Any | None:
        """The message that tells of `delta`; None where it tells nothing."""
        if not _is_plain(delta, self._options):
            return self._made(delta)
        known = self._plain.get(delta.index)
        if known is None:
            message = self._made(delta)
            if message is not None and not message.prompt_logprobs:
                self._plain[delta.index] = message, self._form.text_of(message)
            return message
        message, holder = known
        holder.text = delta.text
        return message

    def last(self, totals: dict[str, Any]) -> Any:
        """The message behind all others."""
        return self._form.piece(**self._frame, **totals)

    def _made(self, delta: TextDelta) -> Any | None:
        message = self._form.piece(**self._frame, prompt_token_ids=self._prompt_ids)
        self._prompt_ids = []
        if delta.index == 0:  # there is one prompt, and choice 0 speaks for it
            message.prompt_logprobs.extend(convert.logprob_messages(self._scores.take(delta)))
        if _has_news(delta, self._options):
            message.choice.CopyFrom(self._form.to_choice(delta, self._options))
        if delta.canvas is not None:
            text = canvas_text(delta, self._model)
            message.canvas.CopyFrom(convert.canvas_message(delta, text))
        tells = message.HasField("choice") or message.HasField("canvas") or message.prompt_logprobs
        return message if tells else None


def prompt_ids_of(generation: Generation, options: Any) -> list[int]:
    """The prompt's token ids, for who asked for them."""
    return generation.prompts[0].token_ids if options.return_token_ids else []


def _is_plain(delta: TextDelta, options: Any) -> bool:
    """Whether `delta` says a bit of text and nothing else."""
    beside = delta.finish_reason or delta.canvas or delta.reasoning or delta.calls or delta.logprobs
    return bool(delta.text) and not beside and not options.return_token_ids


def _has_news(delta: TextDelta, options: Any) -> bool:
    has_ids = options.return_token_ids and delta.token_ids
    says = delta.text or delta.reasoning or delta.calls
    return bool(says or delta.logprobs or delta.finish_reason or has_ids)


def _text_choice(result: TextDelta | ChoiceResult, options: Any) -> pb.TextChoice:
    return pb.TextChoice(text=result.text, **_common(result, options))


def _chat_choice(result: TextDelta | ChoiceResult, options: Any) -> pb.ChatChoice:
    choice = pb.ChatChoice(**_common(result, options))
    choice.message.role = "assistant"
    choice.message.reasoning = result.reasoning
    choice.message.tool_calls.extend(call_messages(result.calls))
    if result.text:
        choice.message.parts.add(text=result.text)
    return choice


def _common(result: TextDelta | ChoiceResult, options: Any) -> dict[str, Any]:
    stop_reason = "" if result.stop_reason is None else str(result.stop_reason)
    return {
        "index": result.index,
        "finish_reason": result.finish_reason or "",
        "stop_reason": stop_reason,
        "logprobs": convert.logprob_messages(result.logprobs),
        "token_ids": result.token_ids if options.return_token_ids else (),
    }


TEXT = Form(
    "cmpl",
    convert.to_text_request,
    _text_choice,
    lambda message: message.choice,
    pb.TextServiceGenerateResponse,
    pb.GenerateStreamResponse,
)
CHAT = Form(
    "chatcmpl",
    convert.to_chat_request,
    _chat_choice,
    lambda message: message.choice.message.parts[0],
    pb.ChatResponse,
    pb.ChatStreamResponse,
)

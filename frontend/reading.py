"""Reads what one choice of a chat says: content, reasoning, tool calls.

It knows output parsers and conversations; it does not know tokens, the engine or the faces.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import orjson

from frontend.parsers.base import (
    Arguments,
    CallBegun,
    Content,
    OutputParser,
    Reasoning,
    ToolSpec,
    new_call_id,
)
from frontend.parsers.calls_or_json import CallsOrJson
from frontend.parsers.free_input import NamedInputParser
from frontend.parsers.registry import TOOL_PARSERS, InTurn, OutputFormat
from frontend.parsers.tools.bare_json import CallListParser, NamedCallParser
from frontend.request import Chat, TextRequest
from tidemill.runtime.errors import Unsupported
from tidemill.structured import Constraint


class CallDelta(NamedTuple):
    """News of the tool call number `call`; `id` and `name` come once, at its beginning."""

    call: int
    id: str = ""
    name: str = ""
    arguments: str = ""


Part = Content | Reasoning | CallDelta


class Said(NamedTuple):
    """What a piece of text says, by kind and, in `parts`, in the order in which it was said."""

    content: str
    reasoning: str
    calls: list[CallDelta]
    parts: list[Part]


class Reading:
    """The state of one choice. `has_calls`: a tool was called."""

    def __init__(self, parser: OutputParser, *, most_calls: int | None = None) -> None:
        """Calls beyond `most_calls` are dropped."""
        self._parser = parser
        self._most_calls = most_calls
        self.has_calls = False
        self._arguments: list[str] = []
        """Those of the call that came last."""

    @property
    def is_cut_off(self) -> bool:
        """Whether the arguments of the last call are not whole."""
        try:
            orjson.loads("".join(self._arguments) or "{}")
        except orjson.JSONDecodeError:
            return True
        return False

    def num_reasoning(self, starts: Sequence[int]) -> int:
        """How many tokens, whose texts start at these places, in order, are reasoning."""
        return sum(
            bisect_left(starts, span.end) - bisect_left(starts, span.start)
            for span in self._parser.reasoned
        )

    def read(self, text: str, *, is_last: bool) -> Said:
        """What became certain with this text; text that may begin a marker is held back."""
        events = self._parser.feed(text)
        if is_last:
            events += self._parser.finish()
        parts: list[Part] = []
        for event in events:
            if not isinstance(event, CallBegun | Arguments):
                _add_text(parts, event)
            elif self._most_calls is None or event.call < self._most_calls:
                _add_call(parts, event)
                self._follow(event)
        return _said(parts)

    def _follow(self, event: CallBegun | Arguments) -> None:
        self.has_calls = True
        if isinstance(event, CallBegun):
            self._arguments = []
        else:
            self._arguments.append(event.text)

    def read_singly(self, texts: Sequence[str], *, is_last: bool) -> tuple[Said, list[list[Part]]]:
        """`read` of texts that come one behind the other, and what came with each of them."""
        by_text: list[list[Part]] = []
        parts: list[Part] = []
        for count, text in enumerate(texts, start=1):
            said = self.read(text, is_last=is_last and count == len(texts))
            by_text.append(said.parts)
            for part in said.parts:
                _add_part(parts, part)
        return _said(parts), by_text


def behind_reasoning(
    constraint: Constraint | None, form: OutputFormat, prompt: str, continued: str = ""
) -> Constraint | None:
    """The constraint of an answer to a chat, which holds behind the reasoning, if the model may
    reason first. Structural tags stand amid free text anyway. `prompt` is the end of the rendered
    conversation, `continued` what it says of the answer."""
    if constraint is None or constraint.kind == "structural_tag":
        return constraint
    found = form.reasoning_behind(prompt, continued)
    if found is not None and constraint.reasoning is not None:
        return constraint  # which knows of calls, too
    return constraint._replace(reasoning=found)


def reading_of(
    chat: Chat, form: OutputFormat, prompt: str, constraint: Constraint | None = None
) -> Reading | None:
    """How an answer to `chat` is read; None: it is content as it stands. `prompt` is the end of the
    rendered conversation, `constraint` what `behind_reasoning` made."""
    parser: OutputParser | None
    if chat.must_call:
        parser = _forced(chat, form)
    elif constraint is None or constraint.kind == "structural_tag" or form.reads_channels:
        return _reading(form.parser(_specs(chat), prompt, chat.continued), chat)
    elif constraint.may_call and form.tools is not None:
        parser = CallsOrJson(form.tools(_specs(chat)))
    else:
        parser = None
    if constraint is not None and constraint.reasoning is not None:
        first = form.parser((), prompt, chat.continued)
        assert first is not None, "a format that reasons reads its reasoning"
        parser = first if parser is None else InTurn(first, parser)
    return _reading(parser, chat)


def _forced(chat: Chat, form: OutputFormat) -> OutputParser:
    """Of calls in JSON alone, which have ids as the model's own calls do."""
    new_id = form.tools.new_id if form.tools else new_call_id
    if not chat.called:
        return CallListParser(_specs(chat), new_id)
    is_text = chat.called in chat.input_formats
    named = NamedInputParser if is_text else NamedCallParser
    return named(chat.called, new_id)


def _reading(parser: OutputParser | None, chat: Chat) -> Reading | None:
    if parser is None:
        return None
    return Reading(parser, most_calls=None if chat.parallel_tool_calls else 1)


def with_markers(request: TextRequest, form: OutputFormat) -> TextRequest:
    """The request with special tokens in its text, where the format's markers are such."""
    chats = [prompt for prompt in request.prompts if isinstance(prompt, Chat)]
    if not any(form.needs_special_tokens(has_tools=bool(chat.tools)) for chat in chats):
        return request
    return replace(request, options=replace(request.options, skip_special_tokens=False))


def check_tools(request: TextRequest, form: OutputFormat, variables: frozenset[str]) -> None:
    """Raises Unsupported for tools where the model could not be told of them, or not be understood.

    `variables` are those that the chat template reads.
    """
    chats = [one for one in request.prompts if isinstance(one, Chat) and one.tools]
    for chat in chats:
        check_place(chat, variables)
    if form.tools is None and not all(chat.must_call for chat in chats):
        raise Unsupported(
            "how this model writes tool calls is not known; leave tools out, or start the server "
            f"with --tool-call-parser and one of {', '.join(sorted(TOOL_PARSERS))}",
            param="tools",
        )


def check_place(chat: Chat, variables: frozenset[str]) -> None:
    """Raises Unsupported for tools that the chat template does not tell the model of."""
    if chat.tools and "tools" not in variables:
        raise Unsupported(
            "the chat template of this model has no place for tools; leave tools out, or start "
            "the server with a template that has one (--chat-template)",
            param="tools",
        )


def _said(parts: list[Part]) -> Said:
    return Said(
        content="".join([part.text for part in parts if isinstance(part, Content)]),
        reasoning="".join([part.text for part in parts if isinstance(part, Reasoning)]),
        calls=[part for part in parts if isinstance(part, CallDelta)],
        parts=parts,
    )


def _add_part(parts: list[Part], part: Part) -> None:
    if not isinstance(part, CallDelta):
        _add_text(parts, part)
    elif part.name:
        parts.append(part)
    else:
        _add_call(parts, Arguments(part.call, part.arguments))


def _add_text(parts: list[Part], event: Content | Reasoning) -> None:
    """Behind text of its kind, if that came last."""
    last = parts[-1] if parts else None
    if isinstance(last, Content | Reasoning) and type(last) is type(event):
        parts[-1] = last._replace(text=last.text + event.text)
    else:
        parts.append(event)


def _add_call(parts: list[Part], event: CallBegun | Arguments) -> None:
    """One entry per call, however many events tell of it."""
    last = parts[-1] if parts else None
    if isinstance(event, CallBegun):
        parts.append(CallDelta(event.call, event.id, event.name))
    elif isinstance(last, CallDelta) and last.call == event.call:
        parts[-1] = last._replace(arguments=last.arguments + event.text)
    else:
        parts.append(CallDelta(event.call, arguments=event.text))


def _specs(chat: Chat) -> list[ToolSpec]:
    functions = [tool["function"] for tool in chat.tools]
    return [ToolSpec(one["name"], one.get("parameters") or {}) for one in functions]

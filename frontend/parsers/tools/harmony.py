"""gpt-oss: OpenAI's harmony messages, <|start|>HEADER<|message|>TEXT<|end|>.

The header names a channel and perhaps a recipient: <|channel|>commentary to=functions.NAME. The
prompt ends within the first header (<|start|>assistant). analysis is reasoning; commentary without
a recipient is a preamble for the user, like final.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from frontend.parsers.grammar import GrammarParser, Markers, Sink, Steps
from tidemill.structured import Reasoning

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_OPENINGS = Markers(_START, _CHANNEL, _MESSAGE, "<|end|>", "<|return|>", "<|call|>")
_BODY_ENDS = Markers("<|end|>", "<|return|>", "<|call|>", _START, _CHANNEL)
_HEADER_END = Markers(_MESSAGE)
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
_FUNCTIONS = "functions."
_MAX_HEADER = 256
_TURN = r"""%llguidance {}
start: thought* final
final: CALLS<|channel|> "final" form <|message|> @answer
thought: <|channel|> "analysis" <|message|> TEXT <|end|> <|start|> "assistant"
form: (" "? <|constrain|>)? (" "? "json")?
TEXT: /(.|\n)*/
"""


def turn_of(schemas: Mapping[str, Any]) -> Reasoning:
    """The rest of a turn behind <|start|>assistant: reasoning, then @answer in the final channel,
    or in its place a call of one of these functions, whose arguments follow its JSON schema. There
    is no place for a preamble."""
    rules = []
    for i, (name, schema) in enumerate(schemas.items()):
        ahead, behind = (json.dumps(f"{head} to={_FUNCTIONS}{name}") for head in ("", "commentary"))
        head = f'({ahead} <|channel|> "commentary" | <|channel|> {behind})'
        rules.append(f"call_{i}: {head} form <|message|> %json {json.dumps(schema)}")
    calls = "".join(f"call_{i} | " for i in range(len(rules)))
    return Reasoning(lark="\n".join([_TURN.replace("CALLS", calls), *rules, ""]))


class HarmonyParser(GrammarParser):
    """Reasoning, calls and content in one. Headers are markup: one that is cut off is dropped,
    unless it is so long that it must be text.

    A call to one of the model's own tools (browser, python), or any call where no tools are
    offered, is shown as reasoning.
    """

    needs_special_tokens = True

    @classmethod
    def in_front(cls, prompt: str, *, begins_inside: bool) -> Reasoning | None:
        """See GrammarParser. A prompt that ends within a message leaves no place for another."""
        return turn_of({}) if prompt.endswith(f"{_START}assistant") else None

    def _read(self) -> Steps[None]:
        marker = ""
        self._hold()
        yield from self._next()
        header = yield from self._accept("to=")
        if header:
            self._held, marker = None, _START
        else:
            self._release()
        while marker or (marker := (yield from self._content_until(_OPENINGS))):
            marker = yield from self._message(marker, header)
            header = ""

    def _message(self, marker: str, header: str) -> Steps[str]:
        """The rest of one message whose `marker` and first part of the `header` were read; returns
        the marker that begins the next one, if one did."""
        if marker not in (_START, _CHANNEL, _MESSAGE):
            self._out.edge()
            return ""
        parts = [header, marker if marker == _CHANNEL else ""]
        if marker != _MESSAGE and not (yield from self._until(_HEADER_END, parts.append)):
            header = "".join(parts)
            self._say(header if len(header) > _MAX_HEADER else "")
            return ""
        put = self._target("".join(parts))
        self._out.edge()
        end = yield from self._until(_BODY_ENDS, put)
        self._out.edge()
        return end if end in (_START, _CHANNEL) else ""

    def _target(self, header: str) -> Sink:
        """Where a message's text goes; begins the call if it is one."""
        recipient = _RECIPIENT.search(header)
        if recipient is not None:
            given = recipient.group(1)
            name = given.removeprefix(_FUNCTIONS)
            if name and self._tools and (name != given or name in self._tools):
                self._begin(name)
                return self._out.arguments
            return self._think
        channel = _CHANNEL_NAME.search(header)
        is_analysis = channel is not None and channel.group(1) == "analysis"
        return self._think if is_analysis else self._say

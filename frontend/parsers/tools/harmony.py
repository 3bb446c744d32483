"""gpt-oss: OpenAI's harmony messages, <|start|>HEADER<|message|>TEXT<|end|>.

The header names a channel and perhaps a recipient: <|channel|>commentary to=functions.NAME. The
prompt ends within the first header (<|start|>assistant). analysis is reasoning; commentary without
a recipient is a preamble for the user, like final.
"""

from __future__ import annotations

import re

from frontend.parsers.grammar import GrammarParser, Markers, Sink, Steps

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_OPENINGS = Markers(_START, _CHANNEL, _MESSAGE, "<|end|>", "<|return|>", "<|call|>")
_BODY_ENDS = Markers("<|end|>", "<|return|>", "<|call|>", _START, _CHANNEL)
_HEADER_END = Markers(_MESSAGE)
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
_FUNCTIONS = "functions."
_MAX_HEADER = 256


class HarmonyParser(GrammarParser):
    """Reasoning, calls and content in one. Headers are markup: one that is cut off is dropped,
    unless it is so long that it must be text.

    A call to one of the model's own tools (browser, python), or any call where no tools are
    offered, is shown as reasoning.
    """

    needs_special_tokens = True

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
            name = recipient.group(1)
            if self._tools and (name.startswith(_FUNCTIONS) or name in self._tools):
                self._begin(name.removeprefix(_FUNCTIONS))
                return self._out.arguments
            return self._think
        channel = _CHANNEL_NAME.search(header)
        is_analysis = channel is not None and channel.group(1) == "analysis"
        return self._think if is_analysis else self._say

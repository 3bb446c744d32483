"""Kimi K2: special tokens around an id that holds the name, and JSON.

<|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}
<|tool_call_end|><|tool_calls_section_end|>, in one line.
"""

from __future__ import annotations

import re

from frontend.parsers.grammar import Markers, Steps
from frontend.parsers.marked_calls import MarkedCallParser

_BEGIN, _END, _ARGUMENTS = (
    "<|tool_call_begin|>",
    "<|tool_call_end|>",
    "<|tool_call_argument_begin|>",
)
_MARKERS = Markers(
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_section_begin|>",
    "<|tool_call_section_end|>",
    _BEGIN,
    _END,
)
_ID = re.compile(r"[\w.:-]*")
_NAMED = re.compile(r"(?:functions\.)?(?P<name>[\w.-]+?)(?P<number>:\d+)?")


class KimiK2Parser(MarkedCallParser):
    """The call's id stays the model's own: its template expects it in the next turn."""

    begin = _BEGIN
    markers = _MARKERS

    def _call(self) -> Steps[bool]:
        yield from self._next()
        call_id = yield from self._word(_ID)
        yield from self._next()
        named = _NAMED.fullmatch(call_id)
        if named is None or not (yield from self._accept(_ARGUMENTS)):
            return False
        if (yield from self._next()) != "{":
            return False
        self._begin(named["name"], call_id if named["number"] else None)
        yield from self._value(self._out.arguments)
        return True

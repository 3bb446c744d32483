"""Qwen3-Coder and Qwen3.5: calls in XML, values as plain text.

<tool_call>
<function=NAME>
<parameter=KEY>
value
</parameter>
</function>
</tool_call>
"""

from __future__ import annotations

import re

from frontend.parsers.grammar import Markers, Steps
from frontend.parsers.tagged_values import TaggedValueParser
from frontend.parsers.values import quoted

_OPEN, _CLOSE, _FUNCTION = "<tool_call>", "</tool_call>", "<function="
_END, _PARAMETER, _PARAMETER_END = "</function>", "<parameter=", "</parameter>"
_MARKERS = Markers(_OPEN, _CLOSE, _FUNCTION)
_VALUE_ENDS = Markers(
    "\n" + _PARAMETER_END, _PARAMETER_END, "\n" + _PARAMETER, "\n" + _END, "\n" + _CLOSE
)
"""The last three, on a line of their own, where a model forgot the first."""
_NAME = re.compile(r"[^\s<>]*")
_KEY = re.compile(r"[^\n<>]*")


class Qwen3CoderParser(TaggedValueParser):
    """The outer tag may be missing. The arguments of a call that is cut off are not closed: half a
    call must not look like a whole one."""

    def _read(self) -> Steps[None]:
        is_open = False
        while marker := (yield from self._outside(_MARKERS, (_CLOSE,) if is_open else ())):
            if marker == _CLOSE:
                if not is_open:
                    self._say(_CLOSE)
                is_open = False
                continue
            self._hold(marker)
            if marker == _OPEN:
                yield from self._next()
                marker = yield from self._accept(_FUNCTION)
            name = (yield from self._word(_NAME)) if marker else ""
            if name and (yield from self._skip(">")):
                self._begin(name)
                is_open = yield from self._parameters(name)
            else:
                self._release()

    def _parameters(self, name: str) -> Steps[bool]:
        """All parameters; whether the outer tag may still have to be closed."""
        lead = "{"
        marker = yield from self._tag()
        while marker == _PARAMETER:
            self._hold(marker)
            key = (yield from self._word(_KEY)).strip()
            if not (yield from self._skip(">")):
                break
            self._held = None
            yield from self._accept("\n")
            self._out.arguments(f"{lead}{quoted(key)}: ")
            lead = ", "
            types = self._types(name, key)
            marker = (yield from self._tagged_value(types, _VALUE_ENDS)).strip()
            if marker == _PARAMETER_END:
                marker = yield from self._tag()
        if marker in (_END, _CLOSE):
            self._end_arguments(lead)
        else:
            yield from self._close(lead, _PARAMETER, _END, _CLOSE)
        return marker != _CLOSE

    def _tag(self) -> Steps[str]:
        yield from self._next()
        return (yield from self._accept(_PARAMETER, _END, _CLOSE))

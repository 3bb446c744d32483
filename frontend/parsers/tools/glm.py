"""GLM-4.5 to 4.7: a name and pairs of tags, values as plain text.

<tool_call>NAME
<arg_key>KEY</arg_key>
<arg_value>value</arg_value>
</tool_call>
"""

from __future__ import annotations

import re

from frontend.parsers.grammar import Markers, Steps
from frontend.parsers.tagged_values import TaggedValueParser
from frontend.parsers.values import quoted

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_KEY, _KEY_END, _VALUE, _VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
_MARKERS = Markers(_OPEN, _CLOSE)
_KEY_ENDS = Markers(_KEY_END, _CLOSE)
_VALUE_ENDS = Markers(_VALUE_END, _CLOSE)
_NAME = re.compile(r"[\w.-]*")


class GlmParser(TaggedValueParser):
    """Line ends between the tags do not matter. The arguments of a call that is cut off are not
    closed: half a call must not look like a whole one."""

    def _read(self) -> Steps[None]:
        while marker := (yield from self._content_until(_MARKERS)):
            if marker == _CLOSE:
                self._say(_CLOSE)
                continue
            self._hold(marker)
            yield from self._next()
            name = yield from self._word(_NAME)
            marker = (yield from self._tag()) if name else ""
            if marker:
                self._begin(name)
                yield from self._arguments(name, marker)
            else:
                self._release()

    def _tag(self) -> Steps[str]:
        yield from self._next()
        return (yield from self._accept(_KEY, _CLOSE))

    def _arguments(self, name: str, marker: str) -> Steps[None]:
        """All pairs, the first of which `marker` begins."""
        lead = "{"
        while marker == _KEY:
            self._hold(marker)
            parts: list[str] = []
            marker = yield from self._until(_KEY_ENDS, parts.append)
            yield from self._next()
            if marker != _KEY_END or not (yield from self._accept(_VALUE)):
                break
            self._held = None
            key = "".join(parts).strip()
            self._out.arguments(f"{lead}{quoted(key)}: ")
            lead = ", "
            marker = yield from self._tagged_value(self._types(name, key), _VALUE_ENDS)
            if marker == _VALUE_END:
                marker = yield from self._tag()
        if marker == _CLOSE:
            self._end_arguments(lead)
        else:
            yield from self._close(lead, _KEY, _VALUE, _CLOSE)

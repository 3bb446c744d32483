"""DeepSeek V3, R1 and V3.1, inside of <｜tool▁calls▁begin｜> and <｜tool▁calls▁end｜>.

V3:   <｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\\n```json\\n{...}\\n```<｜tool▁call▁end｜>
V3.1: <｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>
"""  # noqa: RUF002 (the format's own characters)

from __future__ import annotations

import re

from frontend.parsers.grammar import Markers, Steps
from frontend.parsers.marked_calls import MarkedCallParser

_BEGIN, _END, _SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"  # noqa: RUF001
_MARKERS = Markers(
    "<｜tool▁calls▁begin｜>",  # noqa: RUF001
    "<｜tool▁calls▁end｜>",  # noqa: RUF001
    _BEGIN,
    _END,
)
_NAME = re.compile(r"[\w.-]*")
_FENCE = "```"


class DeepSeekParser(MarkedCallParser):
    """Tells the forms apart by what follows the separator."""

    begin = _BEGIN
    markers = _MARKERS

    def _call(self) -> Steps[bool]:
        yield from self._next()
        name = yield from self._word(_NAME)
        yield from self._next()
        if not name or not (yield from self._accept(_SEPARATOR)):
            return False
        if (yield from self._next()) != "{":
            name = yield from self._word(_NAME)
            yield from self._next()
            if not name or not (yield from self._accept(_FENCE + "json", _FENCE)):
                return False
            if (yield from self._next()) != "{":
                return False
        self._begin(name)
        if (yield from self._value(self._out.arguments)):
            yield from self._next()
            yield from self._accept(_FENCE)
        return True

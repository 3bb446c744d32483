"""Granite 3.2 and 3.3: "Here is my thought process:" and "Here is my response:", in plain words."""

from __future__ import annotations

from frontend.parsers.grammar import GrammarParser, Markers, Steps

_STARTS = ("Here is my thought process:", "Here's my thought process:")
_END = Markers("Here is my response:", "Here's my response:")


class GraniteParser(GrammarParser):
    """An output that does not begin with the first sentence is content."""

    def _read(self) -> Steps[None]:
        self._hold()
        yield from self._next()
        if (yield from self._accept(*_STARTS)):
            self._held = None
            self._out.edge()
            if not (yield from self._until(_END, self._think)):
                return
            self._out.edge()
        else:
            self._release()
        yield from self._rest(self._say)

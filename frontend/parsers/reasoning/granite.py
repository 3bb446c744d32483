"""Granite 3.2 and 3.3: "Here is my thought process:" and "Here is my response:", in plain words."""

from __future__ import annotations

import json

from frontend.parsers.grammar import GrammarParser, Markers, Steps
from tidemill.structured import Reasoning

_STARTS = ("Here is my thought process:", "Here's my thought process:")
_ENDS = ("Here is my response:", "Here's my response:")
_END = Markers(*_ENDS)
_IN_FRONT = f"""%llguidance {{}}
start: (thought SPACE?)? @answer
thought: SPACE? ({" | ".join(map(json.dumps, _STARTS))}) rest
rest[lazy]: /(.|\\n)*({"|".join(_ENDS)})/
SPACE: /[ \\t\\r\\n]{{1,8}}/
"""


class GraniteParser(GrammarParser):
    """An output that does not begin with the first sentence is content."""

    @classmethod
    def in_front(cls, prompt: str, *, begins_inside: bool) -> Reasoning | None:
        """See GrammarParser."""
        return Reasoning(lark=_IN_FRONT)

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

"""Tools of free form are functions of one text: what their calls say, and how a text is a call."""

from __future__ import annotations

import json
from collections.abc import Callable

from frontend.parsers.base import new_call_id
from frontend.parsers.grammar import GrammarParser, Steps, ignore
from frontend.parsers.json_calls import JsonParser

INPUT = "input"


class FreeInputParser(JsonParser):
    """Arguments {"input": TEXT} say TEXT, as content; other ones are the input as they stand."""

    def _read(self) -> Steps[None]:
        self._hold()
        is_object = yield from self._skip("{")
        if is_object and (yield from self._key()) == INPUT and (yield from self._next()) == '"':
            self._held = None
            yield from self._string_text(self._say)
            yield from self._rest(ignore)
        else:
            self._release()
            yield from self._rest(self._say)


class NamedInputParser(GrammarParser):
    """The whole output is the input of one call."""

    def __init__(self, name: str, new_id: Callable[[], str] = new_call_id) -> None:
        self._name = name
        super().__init__((), new_id)

    def _read(self) -> Steps[None]:
        yield from self._peek()
        self._begin(self._name)
        self._out.arguments(f'{{"{INPUT}": "')
        yield from self._rest(self._quote)
        self._out.arguments('"}')

    def _quote(self, text: str) -> None:
        self._out.arguments(json.dumps(text, ensure_ascii=False)[1:-1])

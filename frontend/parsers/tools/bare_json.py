"""Calls without any markup, for outputs that a grammar forces into JSON: a named tool's arguments,
or the list of calls that tool_choice `required` asks for."""

from __future__ import annotations

from collections.abc import Callable

from frontend.parsers.base import new_call_id
from frontend.parsers.grammar import GrammarParser, Steps
from frontend.parsers.json_calls import JsonParser


class NamedCallParser(GrammarParser):
    """The whole output is the arguments of one call."""

    def __init__(self, name: str, new_id: Callable[[], str] = new_call_id) -> None:
        self._name = name
        super().__init__((), new_id)

    def _read(self) -> Steps[None]:
        if not (yield from self._next()):
            return
        self._begin(self._name)
        yield from self._rest(self._out.arguments)


class CallListParser(JsonParser):
    """The output is [{"name": ..., "parameters": {...}}, ...]; what is no call is content, unless
    it may have become one."""

    is_forced = True

    def _read(self) -> Steps[None]:
        self._hold()
        if not (yield from self._call_list()):
            yield from self._give_up()
        yield from self._rest(self._say)

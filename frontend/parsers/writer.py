"""Collects the events of one output. It does not know markers or formats."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby

from frontend.parsers.base import Arguments, CallBegun, Content, Event, Reasoning


class Writer:
    """Events in the order they are written; neighbours of one kind are joined.

    White space between a marker and text is the template's layout and is dropped, which is what
    the templates do with earlier answers. So white space waits for what follows it.
    """

    def __init__(self, new_id: Callable[[], str]) -> None:
        self._new_id = new_id
        self._events: list[Event] = []
        self._space = ""
        self._kind: type[Content] | type[Reasoning] = Content
        self._is_edge = False
        self._num_calls = 0

    def text(self, kind: type[Content] | type[Reasoning], text: str) -> None:
        """Text for the user or of the reasoning."""
        if self._is_edge:
            text = text.lstrip()
        if not text:
            return
        self._is_edge = False
        self._kind = kind
        body = text.rstrip()
        if not body:
            self._space += text
            return
        self._events.append(kind(self._space + body))
        self._space = text[len(body) :]

    def edge(self) -> None:
        """A marker stands here."""
        self._space, self._is_edge = "", True

    def begin(self, name: str, call_id: str | None = None) -> None:
        """A call begins; its arguments may follow at once."""
        self.edge()
        self._events.append(CallBegun(self._num_calls, call_id or self._new_id(), name))
        self._num_calls += 1

    def arguments(self, text: str) -> None:
        """More of the arguments of the call that began last."""
        if text:
            self._events.append(Arguments(self._num_calls - 1, text))

    def flush(self) -> None:
        """White space that nothing followed is text, too."""
        if self._space:
            self._events.append(self._kind(self._space))
        self._space = ""

    def take(self) -> list[Event]:
        """What was written since the last call."""
        events, self._events = self._events, []
        return [_joined(list(group)) for _, group in groupby(events, key=_what)]


def _what(event: Event) -> tuple[object, ...]:
    """Equal for events that say more of the same."""
    return (type(event), *event[:-1])


def _joined(events: list[Event]) -> Event:
    first = events[0]
    if len(events) == 1 or isinstance(first, CallBegun):
        return first
    return first._replace(text="".join([str(event[-1]) for event in events]))

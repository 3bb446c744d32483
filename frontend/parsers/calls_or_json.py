"""An output that is calls or JSON, never both: where a grammar holds it to that."""

from __future__ import annotations

from collections.abc import Sequence

from frontend.parsers.base import Content, Event, OutputParser, Span


class CallsOrJson:
    """The first character tells: no JSON begins with a marker's. JSON is content as it stands, also
    where a string of it quotes a call."""

    def __init__(self, calls: OutputParser) -> None:
        """`calls` reads an output that is calls; their marker begins with '<'."""
        self._calls = calls
        self._held = ""
        self._is_json: bool | None = None

    def feed(self, text: str) -> list[Event]:
        """See OutputParser."""
        if self._is_json is None:
            text, self._held = self._held + text, ""
            first = text.lstrip()[:1]
            if not first:
                self._held = text
                return []
            self._is_json = first != "<"
        if not self._is_json:
            return self._calls.feed(text)
        return [Content(text)] if text else []

    def finish(self) -> list[Event]:
        """See OutputParser."""
        if self._held:
            return [Content(self._held)]
        return [] if self._is_json else self._calls.finish()

    @property
    def reasoned(self) -> Sequence[Span]:
        """See OutputParser."""
        return ()

"""Llama 3.1 to 3.3: {"name": ..., "parameters": {...}}, several with ';' between.

The object stands at the very beginning or behind <|python_tag|>; an object elsewhere is text.
"""

from __future__ import annotations

from frontend.parsers.grammar import Markers, Steps
from frontend.parsers.json_calls import JsonParser

_TAG = "<|python_tag|>"
_MARKERS = Markers(_TAG)


class Llama3JsonParser(JsonParser):
    """An object that is no call of an offered tool is an answer in JSON, and stays content."""

    needs_special_tokens = True

    def _read(self) -> Steps[None]:
        self._hold()
        yield from self._objects()
        while marker := (yield from self._content_until(_MARKERS)):
            self._hold(marker)
            yield from self._objects()

    def _objects(self) -> Steps[None]:
        """As many calls as follow; the caller holds. What is none is released."""
        while (yield from self._next()) == "{":
            if not (yield from self._call_object(is_marked=False)):
                break
            self._hold()
            if not (yield from self._skip(";")) and (yield from self._peek()) == ",":
                self._take(1)
        if not self._ended_behind_separator():
            self._release()

    def _ended_behind_separator(self) -> bool:
        """Whether only the separator behind the last call is held, and nothing follows it."""
        held = "".join(self._held or ())
        is_over = self._has_ended and self._at == len(self._unread)
        if is_over and held.strip() in (";", ","):
            self._held = None
            return True
        return False

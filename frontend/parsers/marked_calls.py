"""Calls that begin at a marker of their own, which is a special token: no text contains it."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from frontend.parsers.grammar import Markers, Steps
from frontend.parsers.json_calls import JsonParser


class MarkedCallParser(JsonParser):
    """Markers that stand alone are dropped."""

    needs_special_tokens = True
    begin: ClassVar[str]
    """The marker in front of a call."""
    markers: ClassVar[Markers]
    """That one and those around calls."""

    def _read(self) -> Steps[None]:
        while marker := (yield from self._content_until(self.markers)):
            if marker != self.begin:
                self._out.edge()
                continue
            self._hold(marker)
            if not (yield from self._call()):
                self._release()

    @abstractmethod
    def _call(self) -> Steps[bool]:
        """What follows a call's marker; False, with nothing told, where it is no call."""

"""Stop strings over a text that arrives in pieces.

It does not know tokens: the caller asks how much text was consumed.
"""

from __future__ import annotations

from typing import NamedTuple


class Checked(NamedTuple):
    """Text that may be shown, and the stop string that ended it, if one did."""

    text: str
    matched: str | None = None


class StopChecker:
    """Finds the first stop string that becomes complete, however the text is cut into pieces.

    The match that ends first wins; of several that end at the same character, the longest. The
    matched string is cut from the text, unless `include` keeps it; what follows it is dropped.
    Text that may still become a stop string is held back (with `include` it is not, because it
    will be shown either way).
    """

    def __init__(self, stops: tuple[str, ...], *, include: bool = False) -> None:
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._include = include
        self._beginnings = [_Beginning(stop) for stop in self._stops]
        self._longest = len(self._stops[0])
        self._tail = ""
        self._num_held = 0

    def feed(self, text: str) -> Checked:
        """Takes the next piece; after a match the object must not be fed again."""
        if not text:
            return Checked("")
        seen = self._tail + text
        shown = len(self._tail) - self._num_held
        match = self._first_match(seen)
        if match is not None:
            start, stop = match
            end = start + len(stop) if self._include else start
            return Checked(seen[shown:end], stop)
        self._num_held = 0 if self._include else self._num_possible(text)
        released = seen[shown : len(seen) - self._num_held]
        self._tail = seen[max(0, len(seen) - self._longest + 1) :] if self._longest > 1 else ""
        return Checked(released)

    def skip(self, text: str) -> str:
        """Text in which nothing may match, nor straddle its end; returned with what was held."""
        for beginning in self._beginnings:
            beginning.forget()
        held, self._tail, self._num_held = self._held(), "", 0
        return held + text

    def flush(self) -> str:
        """The text still held back, when the sequence ended without a match."""
        held, self._tail, self._num_held = self._held(), "", 0
        return held

    def _held(self) -> str:
        return self._tail[len(self._tail) - self._num_held :]

    def _first_match(self, seen: str) -> tuple[int, str] | None:
        found = [(at + len(s), -len(s), s) for s in self._stops if (at := seen.find(s)) >= 0]
        if not found:
            return None
        end, _, stop = min(found)
        return end - len(stop), stop

    def _num_possible(self, text: str) -> int:
        """Length of the longest end of all text up to this one that begins a stop string."""
        return max(beginning.feed(text) for beginning in self._beginnings)


class _Beginning:
    """How much of one stop string the end of a text is (Knuth, Morris and Pratt): every character
    is looked at once, however long the string. What the text does not reach of it costs nothing."""

    def __init__(self, stop: str) -> None:
        self._stop = stop
        self._size = 0
        self._borders = [0]
        """Of the first characters, as many as were ever reached: how much of their beginning is
        their end too."""

    def feed(self, text: str) -> int:
        """The size, behind a text that does not make the string complete."""
        stop, size, at = self._stop, self._size, 0
        while at < len(text):
            if not size:
                at = text.find(stop[0], at)
                if at < 0:
                    break
            while size and stop[size] != text[at]:
                size = self._borders[size - 1]
            size += stop[size] == text[at]
            at += 1
            if size > len(self._borders):
                self._add_border()
        self._size = size
        return size

    def forget(self) -> None:
        """The text begins anew."""
        self._size = 0

    def _add_border(self) -> None:
        """Of one character more."""
        stop, borders = self._stop, self._borders
        last, size = stop[len(borders)], borders[-1]
        while size and stop[size] != last:
            size = borders[size - 1]
        borders.append(size + (stop[size] == last))

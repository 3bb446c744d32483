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
        self._num_held = 0 if self._include else self._num_possible(seen)
        released = seen[shown : len(seen) - self._num_held]
        self._tail = seen[max(0, len(seen) - self._longest + 1) :] if self._longest > 1 else ""
        return Checked(released)

    def skip(self, text: str) -> str:
        """Text in which nothing may match, nor straddle its end; returned with what was held."""
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

    def _num_possible(self, seen: str) -> int:
        """Length of the longest end of `seen` that begins a stop string."""
        for size in range(min(self._longest - 1, len(seen)), 0, -1):
            if any(s.startswith(seen[-size:]) for s in self._stops if len(s) > size):
                return size
        return 0

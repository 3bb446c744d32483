"""Reading text that arrives in pieces as if it were all there.

A format is written as a generator that reads on from where it stands and is suspended, wherever
that is, when the text has run out. What it reads never depends on where pieces end, so neither
does what it writes.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from typing import ClassVar, TypeAlias, TypeVar

from frontend.parsers.base import Content, Event, Reasoning, Span, ToolSpec, new_call_id
from frontend.parsers.writer import Writer
from tidemill import structured

Result = TypeVar("Result")
Steps: TypeAlias = Generator[None, None, Result]
"""A part of a grammar: suspended for want of text, it ends with a result."""
Sink: TypeAlias = Callable[[str], None]

_SPACE = re.compile(r"\s*")


class Markers:
    """Finds the first of several strings in text that may end within one of them."""

    def __init__(self, *names: str) -> None:
        """Raises ValueError for strings that overlap so that the first one is not clear."""
        for one in names:
            if any(one in other[:-1] or other.startswith(one) for other in names if other != one):
                raise ValueError(f"the marker {one!r} begins or lies inside of another one")
        self._names = names
        self._pattern = re.compile("|".join(map(re.escape, names)))
        self._heads = re.compile("|".join({re.escape(name[0]) for name in names}))
        self._longest = max(map(len, names))

    def find(self, text: str, start: int) -> tuple[int, str]:
        """Where the text before the first marker ends, and the marker, or '' if none is complete.

        Without one, text that may still become one does not count as text before it.
        """
        found = self._pattern.search(text, start)
        if found is not None:
            return found.start(), found.group()
        for head in self._heads.finditer(text, max(start, len(text) - self._longest + 1)):
            rest = text[head.start() :]
            if any(name.startswith(rest) for name in self._names):
                return head.start(), ""
        return len(text), ""


class GrammarParser(ABC):
    """An output parser whose format is the generator `_read`."""

    needs_special_tokens: ClassVar[bool] = False
    """Whether the format's markers are special tokens, which are not part of the text unless it is
    decoded with them."""

    new_id: ClassVar[Callable[[], str]] = staticmethod(new_call_id)
    """Names a call as the model's template expects it in the next turn."""

    def __init__(
        self, tools: Sequence[ToolSpec] = (), new_id: Callable[[], str] | None = None
    ) -> None:
        """`tools` are those the client offers; `new_id` names the calls in place of
        the format's own."""
        self._tools = {tool.name: tool for tool in tools}
        self._out = Writer(new_id or type(self).new_id)
        self._unread, self._at = "", 0
        self._num_dropped = 0
        """Characters of the text in front of `_unread`."""
        self.reasoned: list[Span] = []
        """See OutputParser."""
        self._has_ended = False
        self._held: list[str] | None = None
        self._steps = self._read()

    @classmethod
    def in_front(cls, prompt: str, *, begins_inside: bool) -> structured.Reasoning | None:
        """What an output behind `prompt` (its end will do) may say in front of an answer that
        follows a grammar; None: nothing. `begins_inside` where the prompt does not show it."""
        return None

    def feed(self, text: str) -> list[Event]:
        """See OutputParser."""
        self._num_dropped += self._at
        self._unread, self._at = self._unread[self._at :] + text, 0
        next(self._steps, None)
        return self._out.take()

    def finish(self) -> list[Event]:
        """See OutputParser."""
        self._has_ended = True
        for _ in self._steps:
            continue  # it still asks for text once, to learn that there is none
        self._out.flush()
        return self._out.take()

    @abstractmethod
    def _read(self) -> Steps[None]:
        """The format: reads to the end of the text."""

    # Reading. Everything below waits for as much text as it takes to know.

    def _more(self) -> Steps[bool]:
        """Waits for text; False when there is no more."""
        if self._has_ended:
            return False
        yield
        return True

    def _peek(self) -> Steps[str]:
        """The next character, or '' at the end."""
        while self._at == len(self._unread):
            if not (yield from self._more()):
                return ""
        return self._unread[self._at]

    def _take(self, size: int) -> str:
        taken = self._unread[self._at : self._at + size]
        self._at += size
        if self._held is not None:
            self._held.append(taken)
        return taken

    def _run(self, pattern: re.Pattern[str], put: Sink) -> Steps[None]:
        """Takes as many characters as `pattern`, a class of characters, goes on matching."""
        while True:
            found = pattern.match(self._unread, self._at)
            assert found is not None, "a run may be empty"
            put(self._take(found.end() - self._at))
            if self._at < len(self._unread) or not (yield from self._more()):
                return

    def _word(self, pattern: re.Pattern[str]) -> Steps[str]:
        """The same as a string."""
        parts: list[str] = []
        yield from self._run(pattern, parts.append)
        return "".join(parts)

    def _next(self) -> Steps[str]:
        """Takes white space; the character behind it, or '' at the end."""
        yield from self._run(_SPACE, ignore)
        return (yield from self._peek())

    def _skip(self, character: str) -> Steps[bool]:
        """Takes white space and then `character`, if that follows."""
        is_there = (yield from self._next()) == character
        if is_there:
            self._take(1)
        return is_there

    def _accept(self, *names: str) -> Steps[str]:
        """Takes the longest of `names` that follows; '' if none does."""
        for name in sorted(names, key=len, reverse=True):
            while not self._unread.startswith(name, self._at):
                rest = self._unread[self._at : self._at + len(name)]
                if not name.startswith(rest) or not (yield from self._more()):
                    break
            else:
                return self._take(len(name))
        return ""

    def _until(self, markers: Markers, put: Sink) -> Steps[str]:
        """Passes on the text before the first marker, and takes the marker; '' at the end."""
        while True:
            end, marker = markers.find(self._unread, self._at)
            put(self._take(end - self._at))
            if marker:
                return self._take(len(marker))
            if not (yield from self._more()):
                put(self._take(len(self._unread) - self._at))
                return ""

    def _rest(self, put: Sink) -> Steps[None]:
        """Passes on everything that is left."""
        while (yield from self._peek()):
            put(self._take(len(self._unread) - self._at))

    def _content_until(self, markers: Markers) -> Steps[str]:
        """The same for text that the user reads."""
        return (yield from self._until(markers, self._say))

    # Writing.

    def _say(self, text: str) -> None:
        self._out.text(Content, text)

    def _think(self, text: str) -> None:
        """`text` is what was taken last."""
        if not text:
            return
        end = self._num_dropped + self._at
        start = end - len(text)
        if self.reasoned and self.reasoned[-1].end == start:
            start = self.reasoned.pop().start
        self.reasoned.append(Span(start, end))
        self._out.text(Reasoning, text)

    def _hold(self, taken: str = "") -> None:
        """From here on, and with `taken` in front, text may be a call or content."""
        self._held = [taken]

    def _release(self) -> None:
        """It is content."""
        held, self._held = self._held, None
        self._say("".join(held or ()))

    def _begin(self, name: str, call_id: str | None = None) -> None:
        """It is a call."""
        self._held = None
        self._out.begin(name, call_id)


def ignore(text: str) -> None:
    """For text that says nothing."""

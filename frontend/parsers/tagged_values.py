"""Arguments written one by one, as text between tags: the client gets JSON.

What a value is, its schema says: strings are streamed, everything else is read as a whole and stays
a string where it is not of its type.
"""

from __future__ import annotations

from collections.abc import Mapping

from frontend.parsers.grammar import GrammarParser, Markers, Steps
from frontend.parsers.values import quoted, to_json, types_of

STRING = frozenset({"string"})


class TaggedValueParser(GrammarParser):
    """Reads values up to a closing tag. Half a tag at the end of a call is no text."""

    def _types(self, tool: str, key: str) -> frozenset[str]:
        """The types that a tool's schema allows an argument; none where it does not say."""
        known = self._tools.get(tool)
        schemas = known.parameters.get("properties") if known else None
        return types_of(schemas.get(key) if isinstance(schemas, Mapping) else None)

    def _tagged_value(self, types: frozenset[str], ends: Markers) -> Steps[str]:
        """Passes on one value; the marker behind it, '' where the text ends within."""
        put = self._out.arguments
        if not types or types == STRING:
            put('"')
            marker = yield from self._until(ends, lambda text: put(quoted(text)[1:-1]))
            put('"' if marker else "")
            return marker
        parts: list[str] = []
        marker = yield from self._until(ends, parts.append)
        put(to_json("".join(parts), types) if marker else "".join(parts))
        return marker

    def _close(self, lead: str, *tags: str) -> Steps[None]:
        """Ends the arguments of a call, which `lead` would go on, where none of `tags` follows:
        what is held is content. Where the text ends ahead of a tag or within one, the call was cut
        off and its arguments stay open."""
        yield from self._next()
        while self._is_half(self._unread[self._at :], tags):
            if not (yield from self._more()):
                self._take(len(self._unread) - self._at)
                self._held = None
                return
        self._end_arguments(lead)

    def _end_arguments(self, lead: str) -> None:
        """Closes them, ahead of what is held: nothing stands between the parts of a call."""
        self._out.arguments("{}" if lead == "{" else "}")
        self._release()

    def _outside(self, markers: Markers, tags: tuple[str, ...]) -> Steps[str]:
        """Passes on text that the user reads, and takes the marker behind it; '' at the end. Half
        of one of `tags`, which are still to come, is no text there."""

        def put(text: str) -> None:
            is_last = self._has_ended and self._at == len(self._unread)
            self._say("" if is_last and self._is_half(text, tags) else text)

        return (yield from self._until(markers, put))

    @staticmethod
    def _is_half(text: str, tags: tuple[str, ...]) -> bool:
        return any(tag[:-1].startswith(text) for tag in tags)

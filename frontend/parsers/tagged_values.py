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
    """Reads values up to a closing tag."""

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

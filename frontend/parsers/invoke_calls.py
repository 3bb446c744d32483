"""Calls in XML with names as attributes, within the tags of a section, which may be missing:

<invoke name="f"><parameter name="k">v</parameter></invoke>
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import ClassVar

from frontend.parsers.grammar import Markers, Steps
from frontend.parsers.tagged_values import TaggedValueParser
from frontend.parsers.values import quoted

_KEY = re.compile(r"\w*")
_QUOTED = {quote: re.compile(rf"[^{quote}<>]*") for quote in "'\""}
_BARE = re.compile(r"[^\s<>]*")


class InvokeParser(TaggedValueParser):
    """A tag of the section that surrounds no call is text. The arguments of a call that is cut off
    are not closed: half a call must not look like a whole one."""

    sections: ClassVar[tuple[str, ...]]
    """Names of the tags around calls."""
    mark: ClassVar[str] = ""
    """In front of every tag's name but those of sections."""

    def _read(self) -> Steps[None]:
        opens = tuple(f"<{name}>" for name in self.sections)
        closes = tuple(f"</{name}>" for name in self.sections)
        invoke, is_open = f"<{self.mark}invoke", False
        markers = Markers(*opens, *closes, invoke)
        while marker := (yield from self._outside(markers, closes if is_open else ())):
            if marker in closes:
                if not is_open:
                    self._say(marker)
                is_open = False
                continue
            self._hold(marker)
            if marker in opens:
                yield from self._next()
                marker = yield from self._accept(invoke)
            name = ((yield from self._attributes()) or {}).get("name") if marker else ""
            if name:
                self._begin(name)
                is_open = yield from self._parameters(name, closes)
            else:
                self._release()

    def _parameters(self, name: str, closes: tuple[str, ...]) -> Steps[bool]:
        """All parameters of a call; whether the section may still have to be closed."""
        parameter, end = f"<{self.mark}parameter", f"</{self.mark}invoke>"
        value_end = f"</{self.mark}parameter>"
        ends = Markers(value_end, end)
        lead, marker = "{", ""
        while True:
            if marker != end:
                yield from self._next()
                marker = yield from self._accept(parameter, end, *closes)
            if marker != parameter:
                break
            self._hold(marker)
            attributes = (yield from self._attributes()) or {}
            if "name" not in attributes:
                break
            self._held = None
            key = attributes["name"]
            self._out.arguments(f"{lead}{quoted(key)}: ")
            lead = ", "
            marker = yield from self._tagged_value(self._value_types(name, key, attributes), ends)
        if marker in (end, *closes):
            self._end_arguments(lead)
        else:
            yield from self._close(lead, parameter, end, *closes)
        return marker not in closes

    def _value_types(self, tool: str, key: str, attributes: Mapping[str, str]) -> frozenset[str]:
        """What a parameter's value may be."""
        return self._types(tool, key)

    def _attributes(self) -> Steps[dict[str, str] | None]:
        """The rest of an opening tag; None where that is not what follows."""
        found: dict[str, str] = {}
        while (yield from self._next()) != ">":
            key = yield from self._word(_KEY)
            if not key or not (yield from self._skip("=")):
                return None
            quote = yield from self._next()
            if quote in _QUOTED:
                self._take(1)
                found[key] = yield from self._word(_QUOTED[quote])
                if not (yield from self._accept(quote)):
                    return None
            else:
                found[key] = yield from self._word(_BARE)
        self._take(1)
        return found

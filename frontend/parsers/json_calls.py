"""Tool calls written as JSON objects, read as they come.

Arguments are passed on as the model wrote them: writing them anew would have to wait for the end,
or guess it. Only the structure is read; a wrong word inside of the arguments is the client's to
find.
"""

from __future__ import annotations

import json
import re
from typing import ClassVar

from frontend.parsers.grammar import GrammarParser, Sink, Steps, ignore
from frontend.parsers.values import without_halves

_NAME = "name"
_ARGUMENTS = ("arguments", "parameters")
_PLAIN = re.compile(r'[^"{}\[\]<]*')
"""Outside of strings. '<' is no JSON: the format's own marker ends arguments that are not whole."""
_CHARACTERS = re.compile(r'[^"\\]*')
_SCALAR = re.compile(r"[\w.+-]*")
_HEX = tuple("0123456789abcdefABCDEF")


class JsonParser(GrammarParser):
    """Reads JSON values and objects that are calls."""

    is_forced: ClassVar[bool] = False
    """A grammar leaves nothing but calls: what ends before a call is one that was cut off."""

    def _call_object(self, *, is_marked: bool = True) -> Steps[bool]:
        """Reads {"name": ..., "arguments": {...}}, in any order, and says whether it was a call.

        The caller holds the text (`_hold`): up to the point where name and arguments are known,
        nothing is told. Without a marker in front (`is_marked`) an object is a call only if it has
        arguments and names a tool that is offered: it could be an answer in JSON.
        """
        name, early, is_begun, has_arguments = "", list[str](), False, False
        if not (yield from self._skip("{")):
            return False
        while (key := (yield from self._key())) is not None:
            if key == _NAME and not name:
                name = (yield from self._string()) or ""
                if not self._may_be(name, is_marked):
                    break
                if has_arguments:
                    is_begun = True
                    self._begin(name)
                    self._out.arguments("".join(early))
            elif key in _ARGUMENTS and not has_arguments:
                has_arguments = True
                if name:
                    is_begun = True
                    self._begin(name)
                put = self._out.arguments if name else early.append
                if not (yield from self._arguments(put)):
                    break
            elif not (yield from self._value(ignore)):
                break
            if not (yield from self._skip(",")):
                break
        is_closed = yield from self._skip("}")
        is_over = is_closed or (yield from self._is_cut_off())
        if not is_begun and name and is_over and is_marked and not has_arguments:
            is_begun = True
            self._begin(name)
            self._out.arguments("{}" if is_closed else "")
        return is_begun

    def _is_cut_off(self) -> Steps[bool]:
        """Whether the text has ended where only a call can go on."""
        return self.is_forced and not (yield from self._peek())

    def _give_up(self) -> Steps[None]:
        """What is held is no call: it is content, but for the beginning of one."""
        if (yield from self._is_cut_off()):
            self._held = None
        else:
            self._release()

    def _call_list(self) -> Steps[bool]:
        """Reads a list of such objects, or one; says whether there was a call. As above, the
        caller holds. What is no call any more is content."""
        is_list = yield from self._skip("[")
        if not (yield from self._call_object()):
            return False
        while is_list:
            self._hold()
            if not (yield from self._skip(",")):
                self._held = None
                yield from self._skip("]")
                break
            if not (yield from self._call_object()):
                yield from self._give_up()
                break
        return True

    def _may_be(self, name: str, is_marked: bool) -> bool:
        """Whether this may be the name of a tool."""
        return bool(name) and (is_marked or not self._tools or name in self._tools)

    def _arguments(self, put: Sink) -> Steps[bool]:
        """Passes on the arguments; False when they are not whole. Some models write them as a
        string that holds JSON, and null for none."""
        first = yield from self._next()
        if first == '"':
            return (yield from self._string_text(put))
        if first == "n":
            scalar: list[str] = []
            is_whole = yield from self._value(scalar.append)
            word = "".join(scalar)
            put("{}" if word == "null" else word)
            return is_whole
        return (yield from self._value(put))

    def _value(self, put: Sink) -> Steps[bool]:
        """Passes on one JSON value; False when the text ends, or stops being JSON, within."""
        first = yield from self._next()
        if first not in ("{", "[", '"'):
            scalar = yield from self._word(_SCALAR)
            put(scalar)
            return bool(scalar)
        depth = 0
        while True:
            character = yield from self._peek()
            if character == '"':
                if not (yield from self._raw_string(put)):
                    return False
            elif character in ("{", "["):
                put(self._take(1))
                depth += 1
            elif character in ("}", "]"):
                put(self._take(1))
                depth -= 1
            else:
                return False
            if depth == 0:
                return True
            yield from self._run(_PLAIN, put)

    def _raw_string(self, put: Sink) -> Steps[bool]:
        """Passes on a string with its quotes."""
        put(self._take(1))
        while True:
            yield from self._run(_CHARACTERS, put)
            character = yield from self._peek()
            if not character:
                return False
            put(self._take(1))
            if character == '"':
                return True
            if (yield from self._peek()):
                put(self._take(1))

    def _key(self) -> Steps[str | None]:
        """A key and its colon; None if there is no key."""
        key = yield from self._string()
        if key is None or not (yield from self._skip(":")):
            return None
        return key

    def _string(self) -> Steps[str | None]:
        """A string's text; None if there is no whole string."""
        if (yield from self._next()) != '"':
            return None
        parts: list[str] = []
        is_whole = yield from self._string_text(parts.append)
        return "".join(parts) if is_whole else None

    def _string_text(self, put: Sink) -> Steps[bool]:
        """Passes on what a string says, as far as it is certain."""
        self._take(1)
        while True:
            yield from self._run(_CHARACTERS, put)
            character = yield from self._peek()
            if not character:
                return False
            if character == '"':
                self._take(1)
                return True
            escape = yield from self._escape()
            is_half = escape.startswith("\\ud")  # perhaps of a pair
            if is_half and (yield from self._peek()) == "\\":
                escape += yield from self._escape()
            put(_unescaped(escape))

    def _escape(self) -> Steps[str]:
        """A backslash and what belongs to it; hexadecimal digits in lower case."""
        self._take(1)
        kind = yield from self._peek()
        if kind:
            self._take(1)
        digits = ""
        while kind == "u" and len(digits) < 4:
            digit = yield from self._peek()
            if digit not in _HEX:
                break
            digits += self._take(1).lower()
        return f"\\{kind}{digits}"


def _unescaped(escape: str) -> str:
    """What an escape says. Halves of pairs, which are no text, become U+FFFD; a wrong escape
    stays as it was written."""
    try:
        return without_halves(str(json.loads(f'"{escape}"')))
    except ValueError:
        return escape

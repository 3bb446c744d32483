"""Calls as a list of Python calls: Llama 3.2 and 4, ToolACE: [f(a=1, b="x"), g()].

The list stands at the very beginning or behind <|python_start|>. The client gets JSON: strings are
streamed, other values are read as a whole.
"""

from __future__ import annotations

import ast
import re

from frontend.parsers.grammar import GrammarParser, Markers, Steps
from frontend.parsers.values import quoted, to_json, without_halves

_START, _END = "<|python_start|>", "<|python_end|>"
_MARKERS = Markers(_START, _END)
_NAME = re.compile(r"[\w.]*")
_KEY = re.compile(r"\w*")
_PLAIN = {quote: re.compile(rf"[^\\{quote}]*") for quote in "'\""}
_VALUE = re.compile(r"[^'\"()\[\]{},]*")
_OCTAL, _HEX = tuple("01234567"), tuple("0123456789abcdefABCDEF")
_DIGITS = {"x": (2, _HEX), "u": (4, _HEX), "U": (8, _HEX)}
_ESCAPES = (*_OCTAL, *"\\'\"abfnrtvxuU")


class PythonicParser(GrammarParser):
    """A list counts as calls when its first entry is a call of an offered tool by keywords;
    [1] or [x] in an answer stay content."""

    needs_special_tokens = True

    def _read(self) -> Steps[None]:
        self._hold()
        is_open = yield from self._calls()
        while marker := (yield from self._content_until(_MARKERS)):
            if marker == _START:
                self._hold(marker)
                is_open = yield from self._calls()
                continue
            if not is_open:
                self._say(marker)
            is_open = False

    def _calls(self) -> Steps[bool]:
        """A list of calls, if that is what follows, and whether it was; the caller holds."""
        separator = "["
        while (yield from self._skip(separator)):
            if separator == "," and (yield from self._next()) == "]":
                break
            if not (yield from self._call()):
                self._release()
                return separator == ","
            separator = ","
            self._hold()
        is_call = separator == ","
        if is_call and (yield from self._skip("]")):
            self._held = None
        else:
            self._release()
        return is_call

    def _call(self) -> Steps[bool]:
        """One call; False where it is none, or where it stops being one."""
        yield from self._next()
        name = yield from self._word(_NAME)
        if not name or (self._tools and name not in self._tools):
            return False
        if not (yield from self._skip("(")):
            return False
        if (yield from self._skip(")")):
            self._begin(name)
            self._out.arguments("{}")
            return True
        lead = "{"
        while True:
            yield from self._next()
            key = yield from self._word(_KEY)
            if not key and lead != "{" and (yield from self._skip(")")):  # a comma was the last
                self._held = None
                break
            if not key or not (yield from self._skip("=")):
                return False
            self._held = None
            if lead == "{":
                self._begin(name)
            self._out.arguments(f"{lead}{quoted(key)}: ")
            lead = ", "
            is_whole = yield from self._value()
            self._hold()
            if is_whole and (yield from self._skip(")")):
                break
            if not is_whole or not (yield from self._skip(",")):
                return False
        self._held = None
        self._out.arguments("}")
        return True

    def _value(self) -> Steps[bool]:
        """One value; False when it is not whole."""
        first = yield from self._next()
        if first in _PLAIN:
            return (yield from self._string(first))
        parts: list[str] = []
        depth = 0
        while True:
            yield from self._run(_VALUE, parts.append)
            character = yield from self._peek()
            if not character or (depth == 0 and character in (",", ")")):
                break
            if character in _PLAIN:
                yield from self._inner_string(character, parts)
                continue
            parts.append(self._take(1))
            depth += (character in "([{") - (character in ")]}")
        text = "".join(parts)
        if not character:
            self._out.arguments(text)
            return False
        self._out.arguments(to_json(text, frozenset({"any"})))
        return bool(text.strip())

    def _inner_string(self, quote: str, parts: list[str]) -> Steps[None]:
        """A string inside of a value, with its quotes, as it is written."""
        end = yield from self._open_string()
        parts.append(end or 2 * quote)
        while end:
            yield from self._run(_PLAIN[quote], parts.append)
            character = yield from self._peek()
            if character == quote:
                parts.append((yield from self._quotes(end)))
                if parts[-1] == end:
                    return
                continue
            parts.append(self._take(len(character)))
            if not character:
                return
            if (yield from self._peek()):
                parts.append(self._take(1))

    def _open_string(self) -> Steps[str]:
        """Takes the quotes that begin a string; what ends it: one, three, or nothing where it is
        empty."""
        quote = self._take(1)
        if (yield from self._peek()) != quote:
            return quote
        self._take(1)
        if (yield from self._peek()) != quote:
            return ""
        self._take(1)
        return 3 * quote

    def _quotes(self, end: str) -> Steps[str]:
        """Takes quotes that stand here, as many as would end the string; fewer are its text."""
        taken = ""
        while len(taken) < len(end) and (yield from self._peek()) == end[0]:
            taken += self._take(1)
        return taken

    def _string(self, quote: str) -> Steps[bool]:
        """A string, streamed as JSON. Several in a row are one."""
        put = self._out.arguments
        put('"')
        character = quote
        while character in _PLAIN:
            end = yield from self._open_string()
            while end:
                yield from self._run(_PLAIN[end[0]], lambda text: put(quoted(text)[1:-1]))
                character = yield from self._peek()
                if not character:
                    return False
                if character == end[0]:
                    taken = yield from self._quotes(end)
                    if taken == end:
                        break
                    put(quoted(taken)[1:-1])
                else:
                    put(quoted(_unescaped((yield from self._escape())))[1:-1])
            character = yield from self._next()
        put('"')
        return True

    def _escape(self) -> Steps[str]:
        """A backslash and what belongs to it."""
        escape = self._take(1)
        kind = yield from self._peek()
        escape += self._take(len(kind))
        num_digits, digits = _DIGITS.get(kind, (2, _OCTAL) if kind in _OCTAL else (0, ()))
        for _ in range(num_digits):
            if (yield from self._peek()) not in digits:
                break
            escape += self._take(1)
        return escape


def _unescaped(escape: str) -> str:
    """What Python reads in an escape; a wrong one stays as it is written."""
    if escape == "\\\n":
        return ""
    if escape[1:2] not in _ESCAPES:
        return escape
    try:
        return without_halves(str(ast.literal_eval(f'"{escape}"')))
    except (ValueError, SyntaxError):
        return escape

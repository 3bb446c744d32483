"""How deeply the terminals of a Lark grammar stand inside of each other.

A terminal that goes beyond llguidance's limits fails at every one that it stands in, and each adds
its own lines to the error: what compiles in 0.1 s took 23 s to fail, 1,300 terminals deep. It does
not know what terminals match.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping

MAX_TERMINALS = 128
"""Inside of each other, at most: those of programming languages are ten or so."""
_PART = re.compile(
    r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/(?:\\.|[^/\\\n])+/'
    r'|^[ \t]*[?!]*(?P<head>[A-Za-z_]\w*)[^\n:"/]*:'
    r"|\b(?P<used>_?[A-Z][A-Z_0-9]*)\b",
    re.MULTILINE,
)
"""Texts, comments and regular expressions, in which nothing is a name; beginnings of definitions;
and names of terminals."""

MAX_RULES = 1000
"""The same of GBNF, in which states that follow each other may be many."""
_GBNF_PART = re.compile(
    r'"(?:\\.|[^"\\\n])*"|\[(?:\\.|[^\]\\\n])*\]|#[^\n]*'
    r"|^[ \t]*(?P<head>[A-Za-z_][\w-]*)[ \t]*::="
    r"|(?P<used>\b[A-Za-z_][\w-]*)",
    re.MULTILINE,
)


def shallow_lark(text: str) -> str:
    """The same text. Raises ValueError where its terminals are too deep."""
    if text.count("\n") < MAX_TERMINALS:  # a definition has a line of its own
        return text
    depth = max(_depths(_used(text)), default=0)
    if depth > MAX_TERMINALS:
        raise ValueError(
            f"{depth} of its terminals stand inside of each other; at most {MAX_TERMINALS} may. In "
            "Lark, make rules of the outer ones (names in small letters)"
        )
    return text


def shallow_gbnf(text: str) -> str:
    """The same of GBNF, ahead of its translation, which goes through all rules for each that has
    become a terminal: minutes for ten thousand inside of each other."""
    if "::=" not in text:
        return text
    depth = max(_depths(_used(text, _GBNF_PART, str.isascii)), default=0)
    if depth > MAX_RULES:
        raise ValueError(
            f"{depth} of its rules stand inside of each other; at most {MAX_RULES} may"
        )
    return text


def _used(
    text: str, parts: re.Pattern[str] = _PART, counts: Callable[[str], bool] = str.isupper
) -> dict[str, list[str]]:
    """The names in the definition of each, of those that count."""
    used: dict[str, list[str]] = {}
    current: list[str] = []
    for found in parts.finditer(text):
        if name := found["head"]:
            current = used.setdefault(name, []) if counts(name) else []
        elif name := found["used"]:
            current.append(name)
    return used


def _depths(used: Mapping[str, list[str]]) -> Iterator[int]:
    """Of each terminal, itself counted. What stands in itself is the library's to refuse. Without
    recursion: there may be 100,000 of them in a row."""
    depths: dict[str, int] = {}
    for first in used:
        stack = [first]
        while stack:
            name = stack[-1]
            inner = [one for one in used[name] if one in used]
            if name in depths:
                depths[name] = 1 + max((depths[one] for one in inner), default=0)
                stack.pop()
                continue
            depths[name] = 0  # until those inside of it are known
            stack += [one for one in inner if one not in depths]
        yield depths[first]

"""Grammars of what tools of free form are given, in Lark as llguidance reads it."""

from __future__ import annotations

import json
import re

from frontend.request import InputFormat

_IN_SLASHES = {"/": r"\/", "\n": r"\n"}
"""What must be written otherwise in a regular expression of Lark."""


def whole(written: InputFormat) -> str:
    """A grammar of the text alone."""
    if written.syntax == "lark":
        return written.definition
    return f"start: {_regex(written)}\n"


def up_to(written: InputFormat, end: str) -> str:
    """The right side of a rule: the text and what ends it. A regular expression is one lexeme with
    that, because lexemes take as much as they can, and the end may begin with what it takes."""
    if written.syntax == "lark":
        return f"%lark {{\n{written.definition}\n}} {json.dumps(end)}"
    return f"%lark {{\nstart: TEXT\nTEXT: {_regex(written)} {json.dumps(end)}\n}}"


def _regex(written: InputFormat) -> str:
    text = re.sub(r"\\.|[/\n]", lambda one: _IN_SLASHES.get(one[0], one[0]), written.definition)
    return f"/{text}/"

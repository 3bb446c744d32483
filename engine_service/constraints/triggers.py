"""Of structural tags: which trigger begins a text, and which schema a structure has. It does not
know grammars."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Sequence
from typing import Any


def trigger_finder(triggers: Sequence[str]) -> Callable[[str], str | None]:
    """What finds the first trigger that begins a text.

    By their lengths: a megabyte has room for 100,000 triggers and 10,000 texts, and to try each
    with each takes minutes.
    """
    places = {trigger: place for place, trigger in reversed([*enumerate(triggers)]) if trigger}
    lengths = sorted({len(trigger) for trigger in places})

    def find(begin: str) -> str | None:
        heads = (begin[:length] for length in lengths if length <= len(begin))
        return min((head for head in heads if head in places), key=places.__getitem__, default=None)

    return find


def schema_of(structure: dict[str, Any]) -> dict[str, Any]:
    """Its JSON schema; true is any JSON, as where it is the schema of a whole answer.

    Raises ValueError for what is none that a text could fit.
    """
    schema = structure["schema"]
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        begin, shown = reprlib.repr(structure["begin"]), reprlib.repr(schema)
        raise ValueError(
            f"the schema of {begin} is {shown}; it must be an object, or true for any JSON"
        )
    return schema

"""The public JSON-Schema-Test-Suite, and how an instance is written for a grammar."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

_FILE = Path(__file__).parents[1] / "fixtures" / "json_schema_suite" / "draft2020-12.jsonl"
_ANNOTATIONS = "format.json"
"""Says that formats are annotations. Grammars assert them, which optional/format tests."""


class Group(NamedTuple):
    """A schema, and instances that are valid or not."""

    file: str
    description: str
    schema: Any
    tests: list[dict[str, Any]]

    @property
    def is_format(self) -> bool:
        return self.file.startswith("optional/format/")


def groups() -> Iterator[Group]:
    """All groups of draft 2020-12 that a grammar could follow."""
    for line in _FILE.read_text("utf-8").splitlines():
        given = json.loads(line)
        group = Group(*(given[name] for name in Group._fields))
        if group.file != _ANNOTATIONS:
            yield group


def canonical(instance: Any, schema: Any) -> str:
    """An instance as a model would write it: whole numbers without a fraction, as RFC 8785 has
    them, and properties in the order in which the schema names them."""
    places = {name: at for at, name in enumerate(_property_names(schema))}
    return json.dumps(_in_order(instance, places), ensure_ascii=False)


def _in_order(value: Any, places: dict[str, int]) -> Any:
    if isinstance(value, dict):
        names = sorted(value, key=lambda name: places.get(name, len(places)))
        return {name: _in_order(value[name], places) for name in names}
    if isinstance(value, list):
        return [_in_order(one, places) for one in value]
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e21:
        return int(value)
    return value


def _property_names(schema: Any) -> Iterator[str]:
    """Wherever in the schema they stand; names that come twice count where they come last."""
    if isinstance(schema, dict):
        for keyword, inner in schema.items():
            if keyword == "properties" and isinstance(inner, dict):
                yield from inner
            yield from _property_names(inner)
    elif isinstance(schema, list):
        for one in schema:
            yield from _property_names(one)

"""JSON schemas as grammars: what the public test suite calls valid is accepted, byte by byte, and
what it calls invalid is not."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from engine_service.constraints.llguidance import LlGrammars
from engine_service.core.params import ConstraintSpec
from tests.unit.byte_grammars import accepts, byte_grammars
from tests.unit.json_schema_suite import canonical, groups
from tidemill.runtime.errors import InvalidRequest

LEAST, LEAST_FORMATS = 0.98, 0.92
"""Formats are regular expressions: which minutes have a leap second, or that quotes may stand in an
e-mail address, is not told by them."""
KNOWN_FEATURES = {
    "additionalProperties", "allOf", "anyOf", "const", "enum", "exclusiveMaximum",
    "exclusiveMinimum", "items", "maxItems", "maxLength", "maxProperties", "maximum", "minItems",
    "minLength", "minProperties", "minimum", "multipleOf", "pattern", "patternProperties",
    "prefixItems", "properties", "ref", "required", "type",
}  # fmt: skip
"""What must compile, so that refusing more cannot raise the share."""


class Case(NamedTuple):
    """A case of a schema that compiles, and whether it was answered as the suite does."""

    feature: str
    name: str
    is_format: bool
    is_right: bool


class Measured(NamedTuple):
    """`refused` counts the cases whose schema does not compile, by feature and reason."""

    cases: list[Case]
    refused: Counter[tuple[str, str]]


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> LlGrammars:
    return byte_grammars(tmp_path_factory.mktemp("bytes"))


def measure(grammars: LlGrammars, *, schema: Any = None) -> Measured:
    """All of the suite; with `schema` every instance is tried with that one."""
    measured = Measured([], Counter())
    for group in groups():
        feature = Path(group.file).stem
        spec = ConstraintSpec("json_schema", json.dumps(group.schema))
        try:
            grammars.compile(spec)
        except InvalidRequest as refused:
            measured.refused[feature, refused.message.split(": ", 1)[1]] += len(group.tests)
            continue
        if schema is not None:
            spec = ConstraintSpec("json_schema", json.dumps(schema))
        for test in group.tests:
            is_accepted = accepts(grammars, spec, canonical(test["data"], group.schema))
            name = f"{group.file}: {group.description}: {test['description']}"
            is_right = is_accepted == test["valid"]
            measured.cases.append(Case(feature, name, group.is_format, is_right))
    return measured


def share(cases: list[Case]) -> float:
    return sum(case.is_right for case in cases) / len(cases)


def test_schemas_that_compile_are_followed_as_the_suite_has_it(grammars: LlGrammars) -> None:
    measured = measure(grammars)
    words = [case for case in measured.cases if not case.is_format]
    formats = [case for case in measured.cases if case.is_format]
    print(f"\nkeywords: {share(words):.4f} of {len(words)} cases")
    print(f"formats: {share(formats):.4f} of {len(formats)} cases")
    for case in measured.cases:
        if not case.is_right:
            print("  wrong:", case.name)
    for (feature, reason), count in sorted(measured.refused.items()):
        print(f"  refused: {feature} ({count}): {reason}")
    assert share(words) >= LEAST
    assert share(formats) >= LEAST_FORMATS
    assert {case.feature for case in words} >= KNOWN_FEATURES


def test_control_a_grammar_that_ignores_the_schema_fails(grammars: LlGrammars) -> None:
    assert share(measure(grammars, schema={}).cases) < 0.7

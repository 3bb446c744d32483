"""JSON schemas as grammars: what the public test suite calls valid is accepted, byte by byte, and
what it calls invalid is not."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from engine_service.constraints.llguidance import LlGrammars
from engine_service.core.params import ConstraintSpec
from tests.unit.json_schema_suite import canonical, groups
from tidemill.runtime.errors import InvalidRequest

EOS = 256
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
    """Over a vocabulary in which token i is byte i. Without merges, because where a
    grammar leaves no choice only the tokenizer's own way to write the text is allowed."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    rest = [byte for byte in range(256) if byte not in printable]
    names = [chr(b) if b in printable else chr(256 + rest.index(b)) for b in range(256)]
    raw = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(["<|eos|>"])
    folder = tmp_path_factory.mktemp("bytes")
    raw.save(str(folder / "tokenizer.json"))
    return LlGrammars(str(folder), vocab_size=EOS + 1, eos_token_ids=[EOS])


def accepts(grammars: LlGrammars, spec: ConstraintSpec, text: str) -> bool:
    """Whether an answer of exactly this text may be given: every byte of it is in the mask where it
    comes, and the end behind the last one."""
    matcher = grammars.open(spec)
    for token in (*text.encode(), EOS):
        if matcher.is_complete:
            return token == EOS
        (mask,) = grammars.masks([matcher])
        if matcher.failure or not mask[token >> 3] >> (token & 7) & 1:
            return False
        matcher.accept(token)
    return matcher.is_complete


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

"""Terminals that stand inside of each other by the thousand are refused before the library tries:
it took up to 70 s of a thread that compiles grammars, of which there are two."""

from __future__ import annotations

import json
import time

import pytest

from engine_service.constraints.lark_depth import MAX_TERMINALS, shallow_lark
from engine_service.constraints.llguidance import LlGrammars
from engine_service.core.params import ConstraintSpec
from engine_service.model_folder import builtin_models
from tidemill.runtime.errors import InvalidRequest

SECONDS = 5.0
"""More than a refusal takes on a machine that is busy, and less than one of the library's."""


def lark(depth: int) -> str:
    """`depth` terminals inside of each other, which the library's lexer has to keep apart."""
    inner = [f'T{i}: /[a-z]*/ T{i + 1} "a"' for i in range(depth - 1)]
    return "\n".join(["start: T0", *inner, f'T{depth - 1}: "b"', ""])


def gbnf(depth: int) -> str:
    """Of which the library makes terminals."""
    inner = [f't{i} ::= "a" t{i + 1} "b"' for i in range(depth - 1)]
    return "\n".join(["root ::= t0", *inner, f't{depth - 1} ::= "c"', ""])


def tag(depth: int) -> str:
    one = {"begin": "<f>", "lark": lark(depth), "end": "</f>"}
    return json.dumps({"structures": [one], "triggers": ["<f>"]})


@pytest.fixture(scope="module")
def grammars() -> LlGrammars:
    folder = str(builtin_models()["demo"])
    return LlGrammars(folder, vocab_size=320, eos_token_ids=[257])


@pytest.mark.parametrize(
    ("kind", "text"),
    [("ebnf", lark(1000)), ("ebnf", gbnf(300)), ("structural_tag", tag(1000))],
    ids=["lark", "gbnf", "tag"],
)
def test_deep_terminals_are_refused_at_once(grammars: LlGrammars, kind: str, text: str) -> None:
    begun = time.perf_counter()
    with pytest.raises(InvalidRequest, match=r"of its terminals .* at most 128 may") as refused:
        grammars.compile(ConstraintSpec(kind, text))
    assert time.perf_counter() - begun < SECONDS
    assert (refused.value.reason, refused.value.param) == ("GRAMMAR_INVALID", f"constraint.{kind}")


def test_deep_rules_of_gbnf_are_refused_before_they_are_translated(grammars: LlGrammars) -> None:
    begun = time.perf_counter()
    with pytest.raises(InvalidRequest, match=r"10001 of its rules .* at most 1000 may"):
        grammars.compile(ConstraintSpec("ebnf", gbnf(10_000)))
    assert time.perf_counter() - begun < SECONDS
    recursive = 'root ::= value\nvalue ::= "[" (value ("," value)*)? "]" | word\nword ::= [a-z]+\n'
    grammars.compile(ConstraintSpec("ebnf", recursive))


def test_a_chain_up_to_the_limit_compiles(grammars: LlGrammars) -> None:
    grammars.compile(ConstraintSpec("ebnf", lark(MAX_TERMINALS)))
    with pytest.raises(ValueError, match=f"{MAX_TERMINALS + 1} of its terminals"):
        shallow_lark(lark(MAX_TERMINALS + 1))


def test_what_is_broad_and_not_deep_compiles(grammars: LlGrammars) -> None:
    """A large schema, and a grammar of the size of a programming language's."""
    schema = {"type": "object", "properties": {f"field{i}": {"type": "string"} for i in range(500)}}
    grammars.compile(ConstraintSpec("json_schema", json.dumps(schema)))
    words = "\n".join(f'W{i}: "word{i}" SPACE' for i in range(300))
    rules = "\n".join(f"r{i}: W{i} r{i + 1} | W{i}" for i in range(299))
    text = f"start: r0\n{rules}\nr299: W299\nSPACE: / +/\n{words}\n"
    grammars.compile(ConstraintSpec("ebnf", text))


def test_names_in_texts_comments_and_regular_expressions_are_none() -> None:
    """Nor is a rule a terminal, nor does a terminal that stands in itself count without end."""
    places = ('"{}"', '"\\" {}"', "// {}", "/a{}\\/ {}/", "rule{}")
    for place in places:
        lines = [f"T{i}: {place.format(f'T{i + 1}', f'T{i + 1}')}" for i in range(400)]
        shallow_lark("\n".join(lines))
    shallow_lark("\n".join(f"T{i}: T{(i + 1) % 100} T{i}" for i in range(400)))
    shared = "\n".join(f"T{i}: T{i + 1} T{i + 1} T{i + 2}" for i in range(100)) + "\n" * 200
    assert shallow_lark(shared) == shared, "as often as it is told, and not as often as it occurs"

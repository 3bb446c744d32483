"""What compiled grammars hold in memory, and choices of any number."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import tidemill
from engine_service.constraints import llguidance
from engine_service.constraints.llguidance import LlGrammars, LlMatcher
from engine_service.core.params import ConstraintSpec
from tidemill.runtime.errors import InvalidRequest

FOLDER = str(Path(tidemill.__file__).parent / "builtin" / "demo")
WIDE = "((b{1000}){1000}){800}"
"""Few characters, of which the library's lexer can make many states."""

MEASURE = """
import sys
from llguidance import LLMatcher, LLTokenizer
from engine_service.constraints.llguidance import LlGrammars
from engine_service.core.params import ConstraintSpec

def held():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / 2**20

folder, text, ours = sys.argv[1:]
grammars = LlGrammars(folder, vocab_size=512, eos_token_ids=[0])
before = held()
if ours == "True":
    grammars.compile(ConstraintSpec("regex", text))
else:
    kept = LLMatcher(grammars._tokenizer, LLMatcher.grammar_from_regex(text), log_level=0)
    kept.deep_copy().compute_bitmask()
print(held() - before)
"""


@pytest.fixture(scope="module")
def grammars() -> LlGrammars:
    return LlGrammars(FOLDER, vocab_size=512, eos_token_ids=[0])


def spec(kind: str, given: object) -> ConstraintSpec:
    return ConstraintSpec(kind, given if isinstance(given, str) else json.dumps(given))


def answer(grammars: LlGrammars, matcher: LlMatcher, text: str) -> str:
    """As much of `text` as the grammar takes, token by token, and "." where it may end there."""
    taken = b""
    tokenizer = grammars._tokenizer
    for token in tokenizer.tokenize_str(text):
        (mask,) = grammars.masks([matcher])
        if not mask[token // 8] >> token % 8 & 1:
            break
        matcher.accept(token)
        assert not matcher.failure
        taken += tokenizer.decode_bytes([token])
    return taken.decode() + "." * matcher.matcher.is_accepting()


def test_choices_of_any_number(grammars: LlGrammars) -> None:
    """The library's own form of them fails at the first token behind 2,000."""
    listed = [f"entry {i * 7919 % 100_003} of many" for i in range(20_000)]
    for one in (listed[0], listed[12_345], listed[-1]):
        assert answer(grammars, grammars.open(spec("choice", listed)), one) == f"{one}."
    other = grammars.open(spec("choice", listed))
    assert answer(grammars, other, "entry 100003 of many") == "entry 10000"


@pytest.mark.parametrize(
    ("listed", "text", "taken"),
    [
        (["", "a"], "", "."),
        (["", "a"], "ab", "a."),
        ([""], "a", "."),
        (["a", "ab", "abc"], "abd", "ab."),
        (["b", "abc"], "abd", "ab"),
        (['q"\\n', "é\n\t", "𝄞/x"], 'q"\\n', 'q"\\n.'),
        (['q"\\n', "é\n\t", "𝄞/x"], "é\n\t", "é\n\t."),
        (['q"\\n', "é\n\t", "𝄞/x"], "𝄞/x", "𝄞/x."),
        (["<[3]>", "%json {}"], "%json {}", "%json {}."),
    ],
)
def test_choices_are_taken_as_they_stand(
    grammars: LlGrammars, listed: list[str], text: str, taken: str
) -> None:
    assert answer(grammars, grammars.open(spec("choice", listed)), text) == taken


@pytest.mark.parametrize("wrong", ["[]", "{}", '"a"', "[1]", '["a", null]', "a"])
def test_what_is_no_list_of_texts_is_refused(grammars: LlGrammars, wrong: str) -> None:
    with pytest.raises(InvalidRequest, match="The choice does not compile") as refused:
        grammars.open(spec("choice", wrong))
    assert refused.value.param == "constraint.choice"


def megabytes(ours: bool) -> float:
    """What a process of its own holds more behind compiling `WIDE`."""
    command = [sys.executable, "-c", MEASURE, FOLDER, WIDE, str(ours)]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ)
    return float(ran.stdout)


def test_a_short_grammar_holds_little_memory() -> None:
    assert megabytes(ours=True) < 20


def test_control_with_the_limit_of_the_library_it_holds_much() -> None:
    assert megabytes(ours=False) > 100


def test_what_is_kept_is_bounded_by_the_work_in_it(
    grammars: LlGrammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llguidance, "_MAX_KEPT", 90_000)
    monkeypatch.setattr(llguidance, "_FUEL", 20_000)
    small = [spec("regex", f"[a-z]{{{i}}}") for i in range(1, 5)]
    for one in small:
        grammars.compile(one)
    assert all(grammars.is_compiled(one) for one in small)
    grammars.open(small[0])  # the last one used now
    large = spec("regex", "|".join(f"word{i}" for i in range(5000)))
    grammars.compile(large)  # as much as three small ones and more
    kept = [grammars.is_compiled(one) for one in (*small, large)]
    assert kept == [True, False, False, False, True]


def test_a_grammar_that_needs_more_work_than_its_length_allows_compiles(
    grammars: LlGrammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llguidance, "_FUEL", 0)
    schema = spec("json_schema", {"type": "object"})
    grammars.compile(schema)
    assert grammars._kept[schema].fuel == llguidance._MAX_FUEL
    assert answer(grammars, grammars.open(schema), '{"a": 1}') == '{"a": 1}.'


MANY, MANY_PROPERTIES = 35_000, 6_000


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        ("ebnf", "start: " + " | ".join(f'"a{i}"' for i in range(MANY))),
        (
            "json_schema",
            {"type": "object", "properties": {f"p{i}": {} for i in range(MANY_PROPERTIES)}},
        ),
    ],
)
def test_what_would_keep_others_waiting_for_minutes_is_refused(
    grammars: LlGrammars, kind: str, given: object
) -> None:
    with pytest.raises(InvalidRequest, match="too big") as refused:
        grammars.compile(spec(kind, given))
    assert refused.value.param == f"constraint.{kind}"


def test_grammars_as_large_as_the_library_can_follow_compile(grammars: LlGrammars) -> None:
    large = spec("ebnf", "start: " + " | ".join(f'"a{i}"' for i in range(1500)))
    assert answer(grammars, grammars.open(large), "a1499") == "a1499."
    wide = spec("json_schema", {"properties": {f"p{i}": {} for i in range(400)}})
    assert answer(grammars, grammars.open(wide), '{"p399": 1}') == '{"p399": 1}.'

"""A grammar behind reasoning: free text up to the tag, then the grammar as it holds alone."""

from __future__ import annotations

from itertools import product

import pytest

from engine_service.constraints.llguidance import LlGrammars
from engine_service.core.params import ConstraintSpec, ReasoningSpec
from frontend.parsers.registry import output_format
from frontend.parsers.tools.harmony import turn_of
from frontend.reading import behind_reasoning, reading_of
from frontend.request import Chat
from tests.unit.byte_grammars import EOS, accepts, byte_grammars
from tidemill.structured import Constraint, Reasoning

SCHEMA = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'
GRAMMARS = {
    "json_schema": (SCHEMA, '{"a": 1}', '{"a": "x"}'),
    "json_object": ("", '{"b": [1]}', "[1]"),
    "regex": ("[a-c]{2}", "ab", "ad"),
    "choice": ('["yes", "no"]', "yes", "ye"),
    "ebnf": ('start: "x" %json {"type": "null"}', "xnull", "x"),
}
"""With an answer that fits and one that does not."""
THOUGHTS = ("", "Hm é\n", 'a < b </thin {"a": 1} <think>')
SPACES = ("", "\n\n", " ")


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> LlGrammars:
    return byte_grammars(tmp_path_factory.mktemp("bytes"), "[THINK]", "[/THINK]")


@pytest.mark.parametrize("kind", GRAMMARS)
def test_the_grammar_holds_behind_the_tag(grammars: LlGrammars, kind: str) -> None:
    text, fits, does_not = GRAMMARS[kind]
    inside = ConstraintSpec(kind, text, ReasoningSpec("", "</think>"))
    may_think = ConstraintSpec(kind, text, ReasoningSpec("<think>", "</think>"))
    for thought, space in product(THOUGHTS, SPACES):
        behind = f"{thought}</think>{space}"
        assert accepts(grammars, inside, behind + fits), behind
        assert accepts(grammars, may_think, f"<think>{behind}{fits}"), behind
        for wrong in (behind + does_not, behind, f"{behind}</think>{fits}", thought + does_not):
            assert not accepts(grammars, inside, wrong), wrong
            assert not accepts(grammars, may_think, f"<think>{wrong}"), wrong
    assert accepts(grammars, may_think, fits)
    assert not accepts(grammars, may_think, does_not)
    assert not accepts(grammars, inside, fits), "the reasoning must end first"
    assert not accepts(grammars, ConstraintSpec(kind, text), f"<think></think>{fits}"), "control"


def test_tags_may_be_special_tokens(grammars: LlGrammars) -> None:
    start, end = 257, 258
    inside = ConstraintSpec("choice", '["no"]', ReasoningSpec("", "[/THINK]"))
    may_think = ConstraintSpec("choice", '["no"]', ReasoningSpec("[THINK]", "[/THINK]"))
    assert accepts(grammars, inside, [*b"Hm [/THINK] ", end, *b"\nno"])
    assert accepts(grammars, may_think, [start, *b"Hm", end, *b"no"])
    assert accepts(grammars, may_think, b"no")
    for wrong in ([*b"Hm[/THINK]no"], [end, *b"yes"], [EOS], [*b"Hm", start, end, *b"no"]):
        assert not accepts(grammars, inside, wrong)


@pytest.mark.parametrize(
    ("style", "prompt", "expected"),
    [
        ("qwen3", "<|im_start|>assistant\n", Reasoning("<think>", "</think>")),
        ("qwen3", "<|im_start|>assistant\n<think>\n", Reasoning("", "</think>")),
        ("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n", None),
        ("deepseek_r1", "<|Assistant|>", Reasoning("", "</think>")),
        ("mistral", "[/INST]", Reasoning("[THINK]", "[/THINK]")),
        ("openai_gptoss", "<|start|>assistant", turn_of({})),
        ("openai_gptoss", "<|start|>assistant<|channel|>final<|message|>The", None),
        ("none", "<think>", None),
    ],
)
def test_the_prompt_and_the_style_say_what_stands_in_front(
    style: str, prompt: str, expected: Reasoning | None
) -> None:
    form = output_format("none", style, None)
    asked = Constraint("regex", "a", "regex")
    found = behind_reasoning(asked, form, prompt)
    assert found == asked._replace(reasoning=expected)
    tags = Constraint("structural_tag", "{}", "response_format")
    assert behind_reasoning(tags, form, prompt) == tags
    assert behind_reasoning(None, form, prompt) is None


@pytest.mark.parametrize("called", ["", "f"])
def test_a_forced_call_is_read_behind_the_reasoning(called: str) -> None:
    form = output_format("none", "deepseek_r1", None)
    tool = {"type": "function", "function": {"name": "f"}}
    messages = [{"role": "user", "content": "go"}]
    chat = Chat(messages=messages, tools=(tool,), must_call=True, called=called)
    constraint = behind_reasoning(Constraint("ebnf", "", "tool_choice"), form, "")
    reading = reading_of(chat, form, "", constraint)
    assert reading is not None
    written = "{}" if called else '[{"name": "f", "parameters": {}}]'
    said = reading.read(f"Hm.</think>\n\n{written}", is_last=True)
    assert (said.reasoning, said.content) == ("Hm.", "")
    assert [(call.name, call.arguments) for call in said.calls] == [("f", "{}")]


def test_an_answer_by_a_grammar_is_content_behind_the_reasoning() -> None:
    """What looks like a call in it is none."""
    form = output_format("hermes", "qwen3", None)
    chat = Chat(messages=[{"role": "user", "content": "go"}])
    constraint = behind_reasoning(Constraint("regex", ".*", "regex"), form, "")
    reading = reading_of(chat, form, "", constraint)
    assert reading is not None
    said = reading.read('<think>Hm</think>\n<tool_call>{"name": "f"}', is_last=True)
    assert said[:3] == ('<tool_call>{"name": "f"}', "Hm", [])

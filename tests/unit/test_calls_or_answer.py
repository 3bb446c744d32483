"""A format of the answer beside tools that may be called: the output is calls, as the model's own
parser reads them, or JSON by the schema, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest

from engine_service.constraints.llguidance import LlGrammars
from engine_service.core.params import ConstraintSpec, ReasoningSpec
from frontend.calling import with_calls
from frontend.parsers.base import parse_whole
from frontend.parsers.registry import TOOL_PARSERS, OutputFormat, output_format
from frontend.reading import Said, behind_reasoning, reading_of
from frontend.request import Chat, Options, TextRequest
from tests.unit.byte_grammars import accepts, byte_grammars
from tests.unit.test_strict_calls import FORMATS, RIGHT, SCHEMAS, WRONG, tools
from tidemill.runtime.errors import InvalidRequest, Unsupported
from tidemill.structured import Constraint

ANSWER = {
    "type": "object",
    "properties": {"said": {"type": "string"}},
    "required": ["said"],
    "additionalProperties": False,
}
ASKED = Constraint("json_schema", json.dumps(ANSWER), "response_format")
FITS = ('{"said": "so"}', '{"said": "<tool_call>\\n{}"}')
FITS_NOT = ('{"said": 1}', "{}", "So.", "", '{"said": "so"} <tool_call>')
SPECIALS = ("<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|constrain|>", "<|call|>")


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> LlGrammars:
    return byte_grammars(tmp_path_factory.mktemp("bytes"), *SPECIALS)


def chat_of(**fields: Any) -> Chat:
    return Chat(messages=[], **{"tools": tools(SCHEMAS), **fields})


def constraint_of(
    form: OutputFormat, chat: Chat, asked: Constraint | None = ASKED, prompt: str = ""
) -> Constraint:
    request = TextRequest(prompts=(chat,), options=Options(constraint=asked))
    found = behind_reasoning(with_calls(request, form).options.constraint, form, prompt)
    assert found is not None
    return found


def spec_of(constraint: Constraint) -> ConstraintSpec:
    behind = constraint.reasoning
    reasoning = None if behind is None else ReasoningSpec(*behind)
    return ConstraintSpec(constraint.kind, constraint.text, reasoning)


def said(form: OutputFormat, chat: Chat, constraint: Constraint, text: str, prompt: str) -> Said:
    reading = reading_of(chat, form, prompt, constraint)
    assert reading is not None
    pieces = [reading.read(text[i : i + 3], is_last=False) for i in range(0, len(text), 3)]
    pieces.append(reading.read("", is_last=True))
    calls = [call for piece in pieces for call in piece.calls]
    texts = ("".join(p.content for p in pieces), "".join(p.reasoning for p in pieces))
    return Said(*texts, calls, parts=[])


def called(spoken: Said) -> list[tuple[str, Any]]:
    names = {call.call: call.name for call in spoken.calls if call.name}
    return [
        (name, json.loads("".join(c.arguments for c in spoken.calls if c.call == number)))
        for number, name in names.items()
    ]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("reasoning", ["none", "qwen3"])
def test_calls_or_json(grammars: LlGrammars, name: str, reasoning: str) -> None:
    form, chat, write = output_format(name, reasoning, None), chat_of(), FORMATS[name]
    constraint = constraint_of(form, chat)
    assert constraint.param == "response_format"
    spec = spec_of(constraint)
    for ahead in ("", *(["<think>Hm {}\n</think>\n\n"] if reasoning == "qwen3" else [])):
        thought = "Hm {}" if ahead else ""
        for text in FITS:
            assert accepts(grammars, spec, ahead + text), text
            assert said(form, chat, constraint, ahead + text, "") == (text, thought, [], [])
        for calls in RIGHT:
            text = ahead + write(calls)
            assert accepts(grammars, spec, text), text
            spoken = said(form, chat, constraint, text, "")
            assert (spoken.content.strip(), spoken.reasoning) == ("", thought)
            assert called(spoken) == calls
        for calls in WRONG:
            assert not accepts(grammars, spec, ahead + write(calls)), calls
        for text in (*FITS_NOT, "So." + write(RIGHT[0]), write(RIGHT[0]) + FITS[0]):
            assert not accepts(grammars, spec, ahead + text), text


def test_json_that_quotes_a_call_is_none() -> None:
    """Which the format's own parser would believe."""
    form, chat = output_format("hermes", "none", None), chat_of()
    text = '{"said": "<tool_call>{\\"name\\": \\"now\\"}</tool_call>"}'.replace('\\"', '"')
    assert said(form, chat, constraint_of(form, chat), text, "") == (text, "", [], [])
    parser = form.parser((), "") or TOOL_PARSERS["hermes"]()
    assert parse_whole(parser, text).calls, "control"


def test_any_object(grammars: LlGrammars) -> None:
    form = output_format("hermes", "none", None)
    asked = Constraint("json_object", "", "text.format")
    spec = spec_of(constraint_of(form, chat_of(), asked))
    assert accepts(grammars, spec, '{"any": [1]}')
    assert accepts(grammars, spec, FORMATS["hermes"](RIGHT[0]))
    assert not accepts(grammars, spec, "[1]")


def test_what_else_is_said_of_the_answer_stays_as_it_was() -> None:
    form = output_format("hermes", "none", None)
    for asked in (ASKED._replace(param="guided_json"), ASKED._replace(kind="structural_tag")):
        with pytest.raises(InvalidRequest, match="leave out one of them"):
            constraint_of(form, chat_of(), asked)
        plain = chat_of(tools=tools({"free": {}}))
        assert constraint_of(form, plain, asked) == asked
    forced = constraint_of(form, chat_of(must_call=True))
    assert (forced.param, forced.may_call) == ("tool_choice", False)
    assert constraint_of(form, chat_of(tools=())) == ASKED


@pytest.mark.parametrize("name", sorted({*TOOL_PARSERS} - {*FORMATS}))
def test_other_formats_are_refused(name: str) -> None:
    form = output_format(name, "none", None)
    if form.tools in {TOOL_PARSERS[one] for one in FORMATS}:
        assert constraint_of(form, chat_of()).may_call
        return
    with pytest.raises(Unsupported, match="response_format beside tools is served") as caught:
        constraint_of(form, chat_of())
    assert caught.value.param == "response_format"


def test_strict_tools_that_cannot_be_held_are_refused_by_name() -> None:
    form = output_format("glm45", "none", None)
    schemas = {"free": {}, "f": {"properties": {"a": {"type": "string", "pattern": "x"}}}}
    with pytest.raises(Unsupported, match="pattern of 'a' of 'f'") as caught:
        constraint_of(form, chat_of(tools=tools(schemas)))
    assert caught.value.param == "tools[1]"


# Channels.

PROMPT = "<|end|><|start|>assistant"
THOUGHT = '<|channel|>analysis<|message|>Hm {"said": 1}<|end|><|start|>assistant'
FINAL = "<|channel|>final<|message|>"
CALL_HEADS: tuple[Callable[[str], str], ...] = (
    lambda name: f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>",
    lambda name: f" to=functions.{name}<|channel|>commentary json<|message|>",
    lambda name: f"<|channel|>commentary to=functions.{name}<|message|>",
)


def tokens(text: str) -> list[int]:
    """Bytes, and the special tokens."""
    ids: list[int] = []
    while text:
        special = next((one for one in SPECIALS if text.startswith(one)), "")
        ids += [257 + SPECIALS.index(special)] if special else text[0].encode()
        text = text[len(special) or 1 :]
    return ids


FINALS = (FINAL, "<|channel|>final <|constrain|>json<|message|>")
THOUGHTS = ("", THOUGHT, 2 * THOUGHT)
CHANNELS = output_format("openai", "openai_gptoss", None)
WITH_AND_WITHOUT_TOOLS = pytest.mark.parametrize("chat", [chat_of(), chat_of(tools=())])


@WITH_AND_WITHOUT_TOOLS
def test_of_channels_the_last_one_alone_follows_the_format(
    grammars: LlGrammars, chat: Chat
) -> None:
    constraint = constraint_of(CHANNELS, chat, prompt=PROMPT)
    spec, text = spec_of(constraint), FITS[0]
    for thoughts, final in product(THOUGHTS, FINALS):
        whole = thoughts + final + text
        assert accepts(grammars, spec, tokens(whole)), whole
        spoken = said(CHANNELS, chat, constraint, whole, PROMPT)
        assert (spoken.content, bool(spoken.reasoning)) == (text, bool(thoughts))
        assert not spoken.calls
        for wrong in FITS_NOT:
            assert not accepts(grammars, spec, tokens(thoughts + final + wrong)), wrong
        for wrong in (text, f"<|channel|>commentary<|message|>{text}", THOUGHT.split("<|end|>")[0]):
            assert not accepts(grammars, spec, tokens(thoughts + wrong)), wrong


@WITH_AND_WITHOUT_TOOLS
def test_in_its_place_a_call_has_a_channel_of_its_own(grammars: LlGrammars, chat: Chat) -> None:
    constraint = constraint_of(CHANNELS, chat, prompt=PROMPT)
    spec = spec_of(constraint)
    for thoughts, write, calls in product(THOUGHTS, CALL_HEADS, [*RIGHT, *WRONG]):
        name, arguments = calls[-1]
        whole = thoughts + write(name) + json.dumps(arguments, ensure_ascii=False)
        fits = bool(chat.tools) and calls in RIGHT
        assert accepts(grammars, spec, tokens(whole)) == fits, whole
        if fits:
            assert called(said(CHANNELS, chat, constraint, whole, PROMPT)) == calls[-1:]


def test_without_the_exemption_no_channel_would_fit(grammars: LlGrammars) -> None:
    """The control of the test above."""
    spec = spec_of(ASKED)
    assert accepts(grammars, spec, FITS[0])
    assert not accepts(grammars, spec, tokens(FINAL + FITS[0]))


def test_a_forced_call_comes_behind_the_channels_too(grammars: LlGrammars) -> None:
    form, chat = (
        output_format("openai", "openai_gptoss", None),
        chat_of(must_call=True, called="now"),
    )
    constraint = constraint_of(form, chat, None, PROMPT)
    assert accepts(grammars, spec_of(constraint), tokens(THOUGHT + FINAL + "{}"))
    spoken = said(CHANNELS, chat, constraint, THOUGHT + FINAL + "{}", PROMPT)
    assert (spoken.content, called(spoken)) == ("", [("now", {})])


def test_a_model_without_channels_is_told_so(tmp_path: Any) -> None:
    """--reasoning-parser names a format that the model does not have."""
    form = output_format("none", "openai_gptoss", None)
    spec = spec_of(constraint_of(form, chat_of(tools=()), prompt=PROMPT))
    plain = byte_grammars(tmp_path)
    with pytest.raises(InvalidRequest, match=r"reasoning\.lark does not compile") as caught:
        plain.compile(spec)
    assert caught.value.param == "reasoning.lark"
    with pytest.raises(InvalidRequest) as caught:
        plain.compile(spec._replace(text="{"))
    assert caught.value.param == "constraint.json_schema"


@pytest.mark.parametrize("start", ["Here is", "Here's"])
@pytest.mark.parametrize("end", ["Here is", "Here's"])
def test_granite_thinks_in_plain_words(grammars: LlGrammars, start: str, end: str) -> None:
    form, chat = output_format("none", "granite", None), chat_of(tools=())
    constraint = constraint_of(form, chat)
    spec = spec_of(constraint)
    thought = f"{start} my thought process: Here is one. {{}}\n{end} my response:"
    for space in ("", "\n\n"):
        assert accepts(grammars, spec, f"{thought}{space}{FITS[0]}")
        spoken = said(form, chat, constraint, f"{thought}{space}{FITS[0]}", "")
        assert (spoken.content, spoken.reasoning) == (FITS[0], "Here is one. {}")
    for wrong in FITS_NOT:
        assert not accepts(grammars, spec, thought + wrong)
        assert not accepts(grammars, spec, wrong)
    assert accepts(grammars, spec, FITS[0])
    assert not accepts(grammars, spec_of(ASKED), thought + FITS[0]), "control"

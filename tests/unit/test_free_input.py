"""Tools of one text by a grammar: calls that are accepted say such a text, and no other."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from engine_service.constraints.llguidance import LlGrammars
from engine_service.core.params import ConstraintSpec
from frontend.calling import call_constraint, with_calls
from frontend.parsers.base import Arguments, CallBegun, Content, parse_whole
from frontend.parsers.free_input import FreeInputParser
from frontend.parsers.registry import output_format
from frontend.parsers.tools.bare_json import CallListParser
from frontend.reading import reading_of
from frontend.request import Chat, InputFormat, Options, TextRequest
from tests.unit.byte_grammars import accepts, byte_grammars
from tests.unit.test_strict_calls import FORMATS
from tidemill.runtime.errors import Unsupported
from tidemill.structured import Constraint

ADD = InputFormat(
    "lark",
    'start: line+\nline: SIGN WORD NL\nSIGN: /[-+]/\nWORD: /[a-z\\/"]+/\nNL: "\\n"\n',
)
PATH = InputFormat("regex", '(/[a-z"]+)+\n?')
RIGHT = {"lark": ("+a\n", '-a/"b\n+c\n'), "regex": ('/a"', "/a/b", "/a\n")}
WRONG = {"lark": ("a\n", "+A\n", "+a", ""), "regex": ("a", "/", "/A", "", "/a b")}


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> LlGrammars:
    return byte_grammars(tmp_path_factory.mktemp("bytes"))


def chat_of(written: InputFormat, **fields: object) -> Chat:
    text = {"type": "string"}
    if written.syntax == "regex":
        text["pattern"] = f"^(?:{written.definition})$"
    schema = {
        "type": "object",
        "properties": {"input": text},
        "required": ["input"],
        "additionalProperties": False,
    }
    function = {"name": "edit", "parameters": schema, "strict": True}
    return Chat(
        messages=[],
        tools=({"type": "function", "function": function},),
        input_formats={"edit": written},
        **fields,  # type: ignore[arg-type]
    )


def spec_of(chat: Chat, name: str) -> ConstraintSpec:
    constraint = call_constraint(chat, output_format(name, "none", None))
    assert constraint is not None
    return ConstraintSpec(constraint.kind, constraint.text)


@pytest.mark.parametrize("written", [ADD, PATH])
@pytest.mark.parametrize("name", FORMATS)
def test_calls_amid_text_follow_the_grammar(
    grammars: LlGrammars, name: str, written: InputFormat
) -> None:
    chat, write, form = chat_of(written), FORMATS[name], output_format(name, "none", None)
    if name == "hermes" and written is ADD:
        with pytest.raises(Unsupported, match="name the tool in tool_choice") as caught:
            spec_of(chat, name)
        assert caught.value.param == "tools[0]"
        return
    request = TextRequest(
        prompts=(chat,), options=Options(constraint=Constraint("json_object", "", "text.format"))
    )
    either = with_calls(request, form).options.constraint
    assert either is not None
    for spec in (spec_of(chat, name), ConstraintSpec(either.kind, either.text)):
        for text in RIGHT[written.syntax]:
            assert accepts(grammars, spec, write([("edit", {"input": text})])), text
            reading = reading_of(chat, form, "")
            assert reading is not None
            said = reading.read(write([("edit", {"input": text})]), is_last=True)
            assert json.loads("".join(one.arguments for one in said.calls)) == {"input": text}
        for text in WRONG[written.syntax]:
            assert not accepts(grammars, spec, write([("edit", {"input": text})])), text


@pytest.mark.parametrize("written", [ADD, PATH])
def test_a_forced_call_is_the_text(grammars: LlGrammars, written: InputFormat) -> None:
    chat = chat_of(written, must_call=True, called="edit")
    spec, form = spec_of(chat, "none"), output_format("none", "none", None)
    for text in RIGHT[written.syntax]:
        assert accepts(grammars, spec, text), text
        reading = reading_of(chat, form, "")
        assert reading is not None
        pieces = [reading.read(one, is_last=False) for one in text]
        pieces.append(reading.read("", is_last=True))
        calls = [call for piece in pieces for call in piece.calls]
        assert [call.name for call in calls if call.name] == ["edit"]
        assert json.loads("".join(call.arguments for call in calls)) == {"input": text}
    for text in WRONG[written.syntax]:
        assert not accepts(grammars, spec, text), text


@pytest.mark.parametrize(
    ("name", "is_own"), [("mistral", True), ("hermes", False), ("none", False)]
)
@pytest.mark.parametrize(("called", "is_text"), [("edit", True), ("edit", False), ("", False)])
def test_a_forced_call_has_an_id_as_the_models_own_calls_do(
    name: str, is_own: bool, called: str, is_text: bool
) -> None:
    chat = chat_of(PATH, must_call=True, called=called)
    chat = chat if is_text else replace(chat, input_formats={})
    reading = reading_of(chat, output_format(name, "none", None), "")
    assert reading is not None
    said = reading.read('[{"name": "edit", "parameters": {}}]', is_last=True)
    (told,) = {call.id for call in said.calls if call.id}
    assert (len(told) == 9 and told.isalnum()) == is_own
    assert told.startswith("call_") != is_own


def test_among_several_it_is_json(grammars: LlGrammars) -> None:
    spec = spec_of(chat_of(PATH, must_call=True), "none")
    for texts, fits in ((RIGHT["regex"], True), (WRONG["regex"], False)):
        for text in texts:
            call = json.dumps([{"name": "edit", "parameters": {"input": text}}])
            assert accepts(grammars, spec, call) == fits, text
            assert parse_whole(CallListParser(), call).calls
    with pytest.raises(Unsupported, match="give the grammar as a regex") as caught:
        spec_of(chat_of(ADD, must_call=True), "none")
    assert caught.value.param == "tools"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "a\\n\\u00e9\\"}"}', 'a\né"}'),
        (' { "input" : "  a  " } ', "  a  "),
        ('{"input": ""}', ""),
        ('{"input": "a', "a"),
        ('{"input": 5}', '{"input": 5}'),
        ('{"text": "a"}', '{"text": "a"}'),
        ("plain", "plain"),
        ('{"in', '{"in'),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 100])
def test_what_arguments_say(arguments: str, text: str, size: int) -> None:
    parser = FreeInputParser()
    pieces = [arguments[i : i + size] for i in range(0, len(arguments), size)]
    events = [event for one in pieces for event in parser.feed(one)] + parser.finish()
    assert not [one for one in events if isinstance(one, CallBegun | Arguments)]
    assert "".join(one.text for one in events if isinstance(one, Content)) == text

"""Which parser is chosen by name, by template and by request, and what two in turn say."""

from __future__ import annotations

import pytest

from frontend.parsers.base import parse_whole
from frontend.parsers.reasoning.think import ThinkTagsParser
from frontend.parsers.registry import REASONING_PARSERS, TOOL_PARSERS, output_format
from frontend.parsers.tools.deepseek import DeepSeekParser
from frontend.parsers.tools.deepseek_v32 import DeepSeekV32Parser
from frontend.parsers.tools.glm import GlmParser
from frontend.parsers.tools.harmony import HarmonyParser
from frontend.parsers.tools.hermes import HermesParser
from frontend.parsers.tools.kimi_k2 import KimiK2Parser
from frontend.parsers.tools.llama3_json import Llama3JsonParser
from frontend.parsers.tools.minimax_m2 import MiniMaxM2Parser
from frontend.parsers.tools.mistral import MistralParser
from frontend.parsers.tools.pythonic import PythonicParser
from frontend.parsers.tools.qwen3_coder import Qwen3CoderParser
from tests.unit.parser_driver import TOOLS, cut, in_pieces, told
from tests.unit.template_styles import source
from tidemill.runtime.errors import FailedPrecondition
from tidemill.structured import Reasoning

BOTH = (
    '<think>\nI need the weather.\n</think>\n\nLet me look.\n<tool_call>\n{"name": "get_weather", '
    '"arguments": {"city": "<think>"}}\n</tool_call>'
)


@pytest.mark.parametrize(
    ("template", "kind"),
    [
        ('within <tool_call></tool_call> XML tags:\\n{\\"name\\": <function-name>', HermesParser),
        ("<tool_call>\\n<function=example_function_name>\\n<parameter=", Qwen3CoderParser),
        ("<tool_call>{function-name}\\n<arg_key>{arg-key-1}</arg_key>", GlmParser),
        ("<|tool_calls_section_begin|><|tool_call_begin|>{{ call.id }}", KimiK2Parser),
        ("{%- set begin = '<minimax:tool_call>' %}", MiniMaxM2Parser),
        ("<｜DSML｜function_calls>", DeepSeekV32Parser),  # noqa: RUF001
        ("{{- '<|python_tag|>' + tool_call.name }}", Llama3JsonParser),
        ('{"name": function name, "parameters": dictionary of argument name', Llama3JsonParser),
        ("[func_name1(params_name1=params_value1)]", PythonicParser),
        ('{{ "[TOOL_CALLS] [" }}', MistralParser),
        ("'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type']", DeepSeekParser),  # noqa: RUF001
        ('"<|start|>assistant<|channel|>analysis<|message|>"', HarmonyParser),
        ("{{ message.content }}", None),
        (None, None),
    ],
)
def test_the_template_shows_how_calls_are_written(template: str | None, kind: object) -> None:
    assert output_format("auto", "auto", template).tools is kind
    assert output_format("none", "auto", template).tools is None


@pytest.mark.parametrize(
    ("style", "tools", "reasoning"),
    [
        ("qwen3", "hermes", "qwen3"),
        ("llama3", "llama3_json", "none"),
        ("mistral", "mistral", "none"),
        ("deepseek", "deepseek_v3", "qwen3"),
        ("deepseek_v32", "deepseek_v32", "qwen3"),
        ("glm", "glm45", "qwen3"),
        ("kimi", "kimi_k2", "none"),
        ("minimax", "minimax_m2", "qwen3"),
        ("harmony", "openai", "openai_gptoss"),
        ("granite", "none", "granite"),
        ("gemma", "none", "none"),
    ],
)
def test_whole_templates_show_it_too(style: str, tools: str, reasoning: str) -> None:
    found = output_format("auto", "auto", source(style))
    assert found == output_format(tools, reasoning, None)


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{- '<think>\\n\\n</think>\\n\\n' }}", "qwen3"),
        ("[THINK]{{ thinking }}[/THINK]", "mistral"),
        ("thoughts after 'Here is my thought process:'", "granite"),
        ("<|start|>assistant<|channel|>analysis<|message|>", "openai_gptoss"),
        ("{{ message.content }}", None),
    ],
)
def test_the_template_shows_how_reasoning_is_written(template: str, name: str | None) -> None:
    expected = None if name is None else REASONING_PARSERS[name]
    assert output_format("auto", "auto", template).reasoning is expected
    assert output_format("auto", "none", template).reasoning is None


@pytest.mark.parametrize("flag", ["tool-call-parser", "reasoning-parser"])
def test_an_unknown_name_is_refused_with_the_known_ones(flag: str) -> None:
    names = ("hermez", "auto") if flag == "tool-call-parser" else ("auto", "hermez")
    known = TOOL_PARSERS if flag == "tool-call-parser" else REASONING_PARSERS
    with pytest.raises(FailedPrecondition, match=f"--{flag} is 'hermez'") as refused:
        output_format(*names, None)
    assert all(name in str(refused.value) for name in known)


@pytest.mark.parametrize("name", sorted(TOOL_PARSERS))
@pytest.mark.parametrize("text", ["plain", " <tool_call>\n", "[1] {2} <|x|>\n"])
def test_every_parser_hands_text_on_that_is_no_call(name: str, text: str) -> None:
    parser = output_format(name, "none", None).parser(TOOLS, "")
    assert parser is not None
    parsed = parse_whole(parser, text)
    assert (parsed.content, parsed.calls, parsed.reasoning) == (text, [], "")


def test_reasoning_comes_first_and_calls_are_read_in_the_rest() -> None:
    reader = output_format("hermes", "qwen3", None)
    whole = None
    for at in range(len(BOTH)):
        parser = reader.parser(TOOLS, "")
        assert parser is not None
        parsed = told(in_pieces(parser, cut(BOTH, [at])))
        for call in parsed.calls:
            call.id = ""
        whole = whole or parsed
        assert parsed == whole
    assert whole is not None
    assert whole.reasoning == "I need the weather."
    assert whole.content == "Let me look."
    assert [(c.name, c.arguments) for c in whole.calls] == [("get_weather", '{"city": "<think>"}')]


def test_a_call_inside_of_the_reasoning_is_reasoning() -> None:
    parser = output_format("hermes", "deepseek_r1", None).parser(TOOLS, "")
    assert parser is not None
    parsed = parse_whole(parser, '<tool_call>{"name": "now"}</tool_call></think>done')
    assert parsed.reasoning == '<tool_call>{"name": "now"}</tool_call>'
    assert (parsed.content, parsed.calls) == ("done", [])


@pytest.mark.parametrize(
    ("name", "prompt", "is_reasoning"),
    [
        ("qwen3", "<|im_start|>assistant\n", False),
        ("qwen3", "<|im_start|>assistant\n<think>\n", True),
        ("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("deepseek_r1", "<｜Assistant｜>", True),  # noqa: RUF001
        ("deepseek_r1", "<｜Assistant｜></think>", False),  # noqa: RUF001
        ("mistral", "[/INST]", False),
    ],
)
def test_the_prompt_shows_whether_reasoning_is_open(
    name: str, prompt: str, is_reasoning: bool
) -> None:
    parser = output_format("none", name, None).parser((), prompt)
    assert parser is not None
    parsed = parse_whole(parser, "text")
    assert (parsed.reasoning, parsed.content) == (("text", "") if is_reasoning else ("", "text"))


@pytest.mark.parametrize(
    ("name", "continued", "is_reasoning"),
    [
        ("deepseek_r1", "", True),  # the control: this model reasons first
        ("deepseek_r1", "The answer", False),
        ("deepseek_r1", "<think>\nHm", True),
        ("deepseek_r1", "<think>\nHm</think>The", False),
        ("deepseek_r1", "The tag <think>", False),
        ("qwen3", "<think>Hm", True),
        ("qwen3", "The answer", False),
    ],
)
def test_a_text_that_goes_on_with_an_answer_is_content(
    name: str, continued: str, is_reasoning: bool
) -> None:
    form, prompt = output_format("none", name, None), f"<|assistant|>{continued} so far"
    parser = form.parser((), prompt, continued)
    assert parser is not None
    parsed = parse_whole(parser, " text")
    assert (parsed.reasoning, parsed.content) == (("text", "") if is_reasoning else ("", " text"))
    expected = Reasoning("" if is_reasoning else "<think>", "</think>")
    assert form.reasoning_behind(prompt, continued) == expected


def test_without_tools_no_calls_are_looked_for() -> None:
    assert output_format("hermes", "none", None).parser((), "") is None
    parser = output_format("hermes", "qwen3", None).parser((), "")
    assert isinstance(parser, ThinkTagsParser)
    assert parse_whole(parser, "<tool_call>{}").content == "<tool_call>{}"


@pytest.mark.parametrize("has_tools", [False, True])
def test_harmony_reads_everything_at_once(has_tools: bool) -> None:
    reader = output_format("openai", "openai_gptoss", None)
    parser = reader.parser(TOOLS if has_tools else (), "")
    assert isinstance(parser, HarmonyParser)
    parsed = parse_whole(parser, "<|channel|>commentary to=functions.now<|message|>{}<|call|>")
    assert [call.name for call in parsed.calls] == (["now"] if has_tools else [])
    assert parsed.reasoning == ("" if has_tools else "{}")


@pytest.mark.parametrize("recipient", ["functions.", "functions", "python"])
def test_harmony_shows_a_message_to_no_tool_of_the_client_as_reasoning(recipient: str) -> None:
    parser = output_format("openai", "openai_gptoss", None).parser(TOOLS, "")
    assert parser is not None
    text = f'<|channel|>commentary to={recipient} <|constrain|>json<|message|>{{"a": 1}}<|call|>'
    parsed = parse_whole(parser, text)
    assert (parsed.calls, parsed.content, parsed.reasoning) == ([], "", '{"a": 1}')

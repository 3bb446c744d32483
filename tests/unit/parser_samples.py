"""Outputs as models write them, one list per format, with what they say.

The shapes are those of the models' chat templates and cards.
"""

from __future__ import annotations

from frontend.parsers.base import OutputParser
from frontend.parsers.tools.bare_json import CallListParser, NamedCallParser
from frontend.parsers.tools.deepseek import DeepSeekParser
from frontend.parsers.tools.harmony import HarmonyParser
from frontend.parsers.tools.hermes import HermesParser
from frontend.parsers.tools.llama3_json import Llama3JsonParser
from frontend.parsers.tools.mistral import MistralParser
from frontend.parsers.tools.qwen3_coder import Qwen3CoderParser
from tests.unit.parser_driver import Sample, ids, of
from tests.unit.parser_samples_pythonic import PYTHONIC
from tests.unit.parser_samples_tagged import DEEPSEEK_V32, GLM, KIMI, MINIMAX
from tests.unit.reasoning_samples import REASONING


def _named() -> OutputParser:
    return NamedCallParser("get_weather", ids())


W = '{"city": "Paris", "unit": "celsius"}'
NESTED = '{"shape": "a } \\" ] </x> { b", "size": {"w": [1, {"h": 2e3}], "n": null}, "exact": true}'
UNICODE = '{"city": "M\\u00fcnchen \\ud83c\\udf7a 東京 \\\\ \\n"}'

_H, _C = of(HermesParser), of(Qwen3CoderParser)
HERMES = (
    Sample("text", _H, "No tool is needed: 1 < 2 <tool.", "No tool is needed: 1 < 2 <tool."),
    Sample("space only", _H, " \n", " \n"),
    Sample(
        "one", _H,
        '<tool_call>\n{"name": "get_weather", "arguments": ' + W + "}\n</tool_call>",
        calls=(("get_weather", W),),
    ),
    Sample(
        "text around", _H,
        '\n\nLet me look.\n\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\nDone. \n',
        "\n\nLet me look.Done. \n", (("now", "{}"),),
    ),
    Sample(
        "parallel", _H,
        '<tool_call>\n{"name": "get_weather", "arguments": ' + W + "}\n</tool_call>\n"
        '<tool_call>\n{"name": "area", "arguments": ' + NESTED + "}\n</tool_call>",
        calls=(("get_weather", W), ("area", NESTED)),
    ),
    Sample(
        "arguments first, unknown keys, escapes in the name", _H,
        '<tool_call>{"id": [{"x": "}"}], "arguments":' + UNICODE
        + ',"n\\u0061me" : "g\\u0065t_weather", "z": -1.5e3}</tool_call>',
        calls=(("get_weather", UNICODE),),
    ),
    Sample(
        "arguments as a string", _H,
        '<tool_call>{"name": "area", "arguments": "{\\"shape\\": \\"\\u00fc \\ud83c\\udf7a\\"}"}'
        "</tool_call>",
        calls=(("area", '{"shape": "ü 🍺"}'),),
    ),
    Sample(
        "no arguments, null arguments", _H,
        '<tool_call>{"name": "now"}</tool_call><tool_call>{"name": "now", "arguments": null}'
        "</tool_call>",
        calls=(("now", "{}"), ("now", "{}")),
    ),
    Sample(
        "closing brace missing, and one too many", _H,
        '<tool_call>{"name": "get_weather", "arguments": ' + W + "</tool_call> and "
        '<tool_call>{"name": "get_weather", "arguments": ' + W + "}}\n</tool_call>",
        "and", (("get_weather", W), ("get_weather", W)),
    ),
    Sample(
        "closing tag missing", _H,
        '<tool_call>{"name": "now", "arguments": {}}<tool_call>{"name": "now", "arguments": {}}',
        calls=(("now", "{}"), ("now", "{}")),
    ),
    Sample(
        "cut off in the arguments", _H,
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Par',
        calls=(("get_weather", '{"city": "Par'),),
    ),
    Sample(
        "cut off in the name", _H, 'So: <tool_call>\n{"name": "get_we',
        'So: <tool_call>\n{"name": "get_we',
    ),
    Sample(
        "broken arguments", _H,
        '<tool_call>{"name": "get_weather", "arguments": {"city": Paris</tool_call>ok',
        "ok", (("get_weather", '{"city": Paris'),),
    ),
    Sample(
        "no JSON", _H, "The tag <tool_call> ends with </tool_call>, see <tool_call>{x}",
        "The tag <tool_call> ends with </tool_call>, see <tool_call>{x}",
    ),
    Sample(
        "an opening tag twice", _H, '<tool_call>\n<tool_call>\n{"name": "now", "arguments": {}}',
        "<tool_call>", (("now", "{}"),),
    ),
)  # fmt: skip

QWEN3_CODER = (
    Sample(
        "one", _C,
        "I look.\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis \"x\"\\\n"
        "two\n</parameter>\n<parameter=unit>\ncelsius\n</parameter>\n</function>\n</tool_call>",
        "I look.",
        (("get_weather", '{"city": "Paris \\"x\\"\\\\\\ntwo", "unit": "celsius"}'),),
    ),
    Sample(
        "types", _C,
        "<tool_call>\n<function=area>\n<parameter=shape>\n12\n</parameter>\n<parameter=size>\n"
        '{"w": 1,\n "h": "</p>"}\n</parameter>\n<parameter=precision>\n2\n</parameter>\n'
        "<parameter=exact>\nTrue\n</parameter>\n<parameter=scale>\nnull\n</parameter>\n"
        "<parameter=note>\nnull\n</parameter>\n<parameter=points>\n[1, 'a']\n</parameter>\n"
        "<parameter=other>\n7\n</parameter>\n</function>\n</tool_call>",
        calls=((
            "area",
            '{"shape": "12", "size": {"w": 1,\n "h": "</p>"}, "precision": 2, "exact": true, '
            '"scale": null, "note": null, "points": [1, "a"], "other": "7"}',
        ),),
    ),
    Sample(
        "not of their types", _C,
        "<function=area>\n<parameter=precision>\ntwo\n</parameter>\n<parameter=size>\n[1]\n"
        "</parameter>\n<parameter=scale>\nNaN\n</parameter>\n<parameter=exact>\n1\n</parameter>\n"
        "</function>",
        calls=(("area", '{"precision": "two", "size": "[1]", "scale": "NaN", "exact": "1"}'),),
    ),
    Sample(
        "parallel, none, on one line", _C,
        "<tool_call><function=now></function></tool_call>\n<tool_call>\n<function=get_weather>"
        "<parameter=city>Ü 東</parameter></function>\n</tool_call>",
        calls=(("now", "{}"), ("get_weather", '{"city": "Ü 東"}')),
    ),
    Sample(
        "closing tags of parameters forgotten", _C,
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n<parameter=unit>\ncelsius\n"
        "</function>\n</tool_call>",
        calls=(("get_weather", '{"city": "Paris", "unit": "celsius"}'),),
    ),
    Sample(
        "value that looks like tags", _C,
        "<tool_call>\n<function=get_weather>\n<parameter=city>\n\n<a></b> <parameter </par\n\n"
        "</parameter>\n</function>\n</tool_call>",
        calls=(("get_weather", '{"city": "\\n<a></b> <parameter </par\\n"}'),),
    ),
    Sample(
        "cut off in a string", _C,
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nPar",
        calls=(("get_weather", '{"city": "Par'),),
    ),
    Sample(
        "cut off in a number", _C,
        "<tool_call>\n<function=area>\n<parameter=precision>\n12",
        calls=(("area", '{"precision": 12'),),
    ),
    Sample(
        "cut off between parameters", _C,
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n",
        calls=(("get_weather", '{"city": "Paris"'),),
    ),
    Sample("cut off in the name", _C, "<tool_call>\n<function=get", "<tool_call>\n<function=get"),
    Sample("no function", _C, "a <tool_call>\n{} </tool_call>", "a <tool_call>\n{} </tool_call>"),
    Sample(
        "text within", _C,
        "<tool_call><function=now>\nhm\n</function></tool_call>",
        "hm\n</function>", (("now", "{}"),),
    ),
)  # fmt: skip

_L = of(Llama3JsonParser)
LLAMA3 = (
    Sample(
        "one", _L, '{"name": "get_weather", "parameters": ' + W + "}", calls=(("get_weather", W),)
    ),
    Sample(
        "tag, type, several", _L,
        '<|python_tag|>{"type": "function", "name": "get_weather", "parameters": ' + W + "}; "
        '{"name": "area", "parameters": ' + NESTED + "}",
        calls=(("get_weather", W), ("area", NESTED)),
    ),
    Sample(
        "separators", _L,
        ' {"name": "now", "parameters": {}};\n{"name": "now", "arguments": {}}, '
        '{"parameters": {}, "name": "now"}{"name": "now", "parameters": {}} ;',
        calls=(("now", "{}"),) * 4,
    ),
    Sample("a JSON answer", _L, '{"name": "Tom", "age": 31}', '{"name": "Tom", "age": 31}'),
    Sample(
        "a JSON answer with parameters", _L,
        '{"name": "Tom", "parameters": {"a": 1}} yes',
        '{"name": "Tom", "parameters": {"a": 1}} yes',
    ),
    Sample(
        "text behind", _L, '{"name": "now", "parameters": {}}\nI called; {"a": 1}',
        'I called; {"a": 1}', (("now", "{}"),),
    ),
    Sample(
        "text in front of the tag", _L,
        'Sure. <|python_tag|>{"name": "now", "parameters": {}}', "Sure.", (("now", "{}"),),
    ),
    Sample(
        "built-in tool's code", _L, '<|python_tag|>brave_search.call(query="x")',
        '<|python_tag|>brave_search.call(query="x")',
    ),
    Sample(
        "cut off", _L, '{"name": "area", "parameters": {"size": {"w": [1, 2',
        calls=(("area", '{"size": {"w": [1, 2'),),
    ),
    Sample("cut off early", _L, '{"name": "area", "para', '{"name": "area", "para'),
    Sample("text", _L, "\nThe set {1} <|", "\nThe set {1} <|"),
    Sample("code", _L, "{\n  int x;\n}", "{\n  int x;\n}"),
)  # fmt: skip

_M = of(MistralParser)
MISTRAL = (
    Sample(
        "list", _M, '[TOOL_CALLS] [{"name": "get_weather", "arguments": ' + W + "}]",
        calls=(("get_weather", W),),
    ),
    Sample(
        "list of two, loose", _M,
        '[TOOL_CALLS]  [ {"name":"get_weather" , "arguments" : ' + W + "} , "
        '{"arguments": ' + NESTED + ', "name": "area"}] ',
        calls=(("get_weather", W), ("area", NESTED)),
    ),
    Sample(
        "v11", _M, "On it.[TOOL_CALLS]get_weather" + W + "[TOOL_CALLS]area" + NESTED,
        "On it.", (("get_weather", W), ("area", NESTED)),
    ),
    Sample(
        "v13", _M, "[TOOL_CALLS]get_weather[ARGS]" + UNICODE + "[TOOL_CALLS]now[ARGS]{}",
        calls=(("get_weather", UNICODE), ("now", "{}")),
    ),
    Sample("with an id", _M, "[TOOL_CALLS]now[CALL_ID]aB3dE5gH7[ARGS]{}", calls=(("now", "{}"),)),
    Sample(
        "list cut off", _M,
        '[TOOL_CALLS] [{"name": "now", "arguments": {}}, {"name": "area", "arguments": {"shape',
        calls=(("now", "{}"), ("area", '{"shape')),
    ),
    Sample(
        "second is none", _M, '[TOOL_CALLS] [{"name": "now", "arguments": {}}, {"a": 1}] x',
        ', {"a": 1}] x', (("now", "{}"),),
    ),
    Sample("v11 cut off", _M, "[TOOL_CALLS]area{\"size\": {", calls=(("area", '{"size": {'),)),
    Sample("v11 without arguments", _M, "[TOOL_CALLS]now and then", "[TOOL_CALLS]now and then"),
    Sample("text", _M, "[TOOL] [x] [TOOL_CALLS", "[TOOL] [x] [TOOL_CALLS"),
)  # fmt: skip

_D = of(DeepSeekParser)
_BB, _EE, _B, _E, _S = (
    "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>",  # noqa: RUF001
    "<｜tool▁call▁end｜>", "<｜tool▁sep｜>",  # noqa: RUF001
)  # fmt: skip
DEEPSEEK = (
    Sample(
        "V3", _D,
        f"Looking.{_BB}{_B}function{_S}get_weather\n```json\n{W}\n```{_E}\n"
        f"{_B}function{_S}area\n```json\n{NESTED}\n```{_E}{_EE}",
        "Looking.", (("get_weather", W), ("area", NESTED)),
    ),
    Sample(
        "V3.1", _D, f"Looking.{_BB}{_B}get_weather{_S}{W}{_E}{_B}area{_S}{NESTED}{_E}{_EE} after",
        "Looking.after", (("get_weather", W), ("area", NESTED)),
    ),
    Sample("a tool called function", _D, f"{_BB}{_B}function{_S}{{}}{_E}{_EE}",
           calls=(("function", "{}"),)),
    Sample("cut off", _D, f"{_BB}{_B}area{_S}" + '{"size": {"w": 1', calls=(
        ("area", '{"size": {"w": 1'),)),
    Sample("V3 cut off", _D, f"{_BB}{_B}function{_S}area\n```json\n" + '{"shape": "a`', calls=(
        ("area", '{"shape": "a`'),)),
    Sample("broken", _D, f"{_BB}{_B}area{_S}" + '{"size": {"w": 1' + f"{_E}{_EE}", calls=(
        ("area", '{"size": {"w": 1'),)),
    Sample("no separator", _D, f"{_BB}{_B}area {{}}{_E}{_EE}", f"{_B}area {{}}"),
    Sample("text", _D, "a < b <｜tool", "a < b <｜tool"),  # noqa: RUF001
)  # fmt: skip


_G = of(HarmonyParser)
HARMONY = (
    Sample(
        "reasoning and answer", _G,
        '<|channel|>analysis<|message|>User asks: "2 + 2?"<|end|>\n<|start|>assistant<|channel|>'
        "final<|message|>2 + 2 = 4.<|return|>",
        "2 + 2 = 4.", reasoning='User asks: "2 + 2?"',
    ),
    Sample(
        "call", _G,
        "<|channel|>analysis<|message|>Need to use function get_weather.<|end|><|start|>assistant"
        "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>" + W
        + "<|call|>",
        calls=(("get_weather", W),), reasoning="Need to use function get_weather.",
    ),
    Sample(
        "preamble, recipient in the role, two calls, no end", _G,
        "<|channel|>commentary<|message|>**Plan**:\n1. Look<|end|><|start|>assistant"
        " to=functions.get_weather<|channel|>commentary json<|message|>" + W + "<|call|><|start|>"
        "assistant<|channel|>commentary to=functions.area<|constrain|>json<|message|>" + NESTED,
        "**Plan**:\n1. Look", (("get_weather", W), ("area", NESTED)),
    ),
    Sample(
        "recipient at once", _G, " to=functions.now<|channel|>commentary<|message|>{}<|call|>",
        calls=(("now", "{}"),),
    ),
    Sample(
        "the model's own tool", _G,
        '<|channel|>analysis to=browser.search code<|message|>{"query": "x"}<|call|>',
        reasoning='{"query": "x"}',
    ),
    Sample(
        "end forgotten", _G, "<|channel|>analysis<|message|>Hm.<|channel|>final<|message|>Yes.",
        "Yes.", reasoning="Hm.",
    ),
    Sample("header cut off", _G, "<|channel|>analysis<|message|>Hm.<|end|><|start|>assis",
           reasoning="Hm."),
    Sample("plain text", _G, "to be or not to=be", "to be or not to=be"),
)  # fmt: skip

BARE = (
    Sample("named", _named, " " + NESTED + "\n", calls=(("get_weather", NESTED + "\n"),)),
    Sample("named, empty", _named, ""),
    Sample(
        "list", of(CallListParser),
        '[{"name": "get_weather", "parameters": ' + W + '}, {"name": "now", "parameters": {}}]\n',
        calls=(("get_weather", W), ("now", "{}")),
    ),
    Sample("no call", of(CallListParser), '["x"]', '["x"]'),
    Sample("cut off in the name", of(CallListParser), '[{"name": "get_w'),
    Sample(
        "cut off behind the name", of(CallListParser), '[{"name": "get_weather", "para',
        calls=(("get_weather", ""),),
    ),
    Sample(
        "cut off in the second", of(CallListParser),
        '[{"name": "get_weather", "parameters": ' + W + '}, {"name": "no',
        calls=(("get_weather", W),),
    ),
)  # fmt: skip

SAMPLES = {
    "hermes": HERMES,
    "qwen3_coder": QWEN3_CODER,
    "llama3_json": LLAMA3,
    "mistral": MISTRAL,
    "deepseek": DEEPSEEK,
    "deepseek_v32": DEEPSEEK_V32,
    "glm": GLM,
    "kimi_k2": KIMI,
    "minimax_m2": MINIMAX,
    "pythonic": PYTHONIC,
    "harmony": HARMONY,
    "bare": BARE,
    "reasoning": REASONING,
}

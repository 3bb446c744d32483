"""Outputs of the formats of 2025 and later, as parser_samples.py has them of the others."""

from __future__ import annotations

from frontend.parsers.tools.deepseek_v32 import DeepSeekV32Parser
from frontend.parsers.tools.glm import GlmParser
from frontend.parsers.tools.kimi_k2 import KimiK2Parser
from frontend.parsers.tools.minimax_m2 import MiniMaxM2Parser
from tests.unit.parser_driver import Sample, of

W = '{"city": "Paris", "unit": "celsius"}'
TYPED = (
    '{"shape": "12", "size": {"w": 1,\n "h": "</p>"}, "precision": 2, "exact": true, '
    '"scale": null, "note": null, "points": [1, "a"], "other": "7"}'
)


def _pairs(*pairs: tuple[str, str]) -> str:
    return "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in pairs)


VALUES = (
    ("shape", "12"), ("size", '{"w": 1,\n "h": "</p>"}'), ("precision", "2"), ("exact", "True"),
    ("scale", "null"), ("note", "null"), ("points", "[1, 'a']"), ("other", "7"),
)  # fmt: skip

_G = of(GlmParser)
GLM = (
    Sample(
        "one", _G,
        "I look.\n<tool_call>get_weather\n" + _pairs(("city", "Paris"), ("unit", "celsius"))
        + "</tool_call>",
        "I look.", (("get_weather", W),),
    ),
    Sample(
        "4.7 has no line ends", _G,
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Ü \"東\"\\\n</arg_value>"
        "</tool_call><tool_call>now</tool_call>",
        calls=(("get_weather", '{"city": "Ü \\"東\\"\\\\\\n"}'), ("now", "{}")),
    ),
    Sample(
        "types", _G, "<tool_call>area\n" + _pairs(*VALUES) + "</tool_call> \n ok",
        "ok", (("area", TYPED),),
    ),
    Sample(
        "value that looks like tags", _G,
        "<tool_call>get_weather\n" + _pairs(("city", "<a></b> <arg_key> </arg")) + "</tool_call>",
        calls=(("get_weather", '{"city": "<a></b> <arg_key> </arg"}'),),
    ),
    Sample(
        "closing tag of a value forgotten", _G,
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</tool_call>on",
        "on", (("get_weather", '{"city": "Paris"}'),),
    ),
    Sample(
        "cut off in a string", _G,
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Par",
        calls=(("get_weather", '{"city": "Par'),),
    ),
    Sample(
        "cut off between pairs", _G,
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n",
        calls=(("get_weather", '{"city": "Paris"'),),
    ),
    Sample("cut off in the name", _G, "<tool_call>get_we", "<tool_call>get_we"),
    Sample("no call", _G, "a <tool_call> b c </tool_call> d", "a <tool_call> b c </tool_call> d"),
    Sample(
        "a key without a value", _G,
        "<tool_call>now\n<arg_key>k</arg_key>\nhm</tool_call>",
        "<arg_key>k</arg_key>\nhm</tool_call>", (("now", "{}"),),
    ),
)  # fmt: skip

_K = of(KimiK2Parser)
_SB, _SE = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_B, _A, _E = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
KIMI = (
    Sample(
        "two", _K,
        f"Looking. {_SB}{_B}functions.get_weather:0{_A}{W}{_E}{_B}functions.now:1{_A}{{}}{_E}{_SE}",
        "Looking.", (("get_weather", W), ("now", "{}")),
    ),
    Sample(
        "white space, another spelling, no prefix", _K,
        f"<|tool_call_section_begin|>\n{_B} get_weather:12 {_A} {W} {_E}\n"
        "<|tool_call_section_end|>",
        calls=(("get_weather", W),),
    ),
    Sample("no number", _K, f"{_SB}{_B}now{_A}{{}}{_E}{_SE}", calls=(("now", "{}"),)),
    Sample("a dot in the name", _K, f"{_B}functions.a.b:0{_A}{{}}{_E}", calls=(("a.b", "{}"),)),
    Sample("cut off", _K, f"{_SB}{_B}functions.area:0{_A}" + '{"size": {"w": 1',
           calls=(("area", '{"size": {"w": 1'),)),
    Sample("broken", _K, f"{_B}functions.area:0{_A}" + '{"size": {"w": 1' + f"{_E}{_SE}",
           calls=(("area", '{"size": {"w": 1'),)),
    Sample("no arguments", _K, f"{_B}functions.area:0 {{}}{_E}", f"{_B}functions.area:0 {{}}"),
    Sample("no JSON", _K, f"{_B}functions.area:0{_A}x{_E}", f"{_B}functions.area:0{_A}x"),
    Sample("text", _K, "a < b <|tool", "a < b <|tool"),
)  # fmt: skip


def _invoke(name: str, *values: tuple[str, str], mark: str = "") -> str:
    inner = "".join(f'<{mark}parameter name="{k}">{v}</{mark}parameter>\n' for k, v in values)
    return f'<{mark}invoke name="{name}">\n{inner}</{mark}invoke>\n'


_M = of(MiniMaxM2Parser)
_O, _C = "<minimax:tool_call>\n", "</minimax:tool_call>"
MINIMAX = (
    Sample(
        "one", _M,
        f"I look.\n{_O}{_invoke('get_weather', ('city', 'Paris'), ('unit', 'celsius'))}{_C}",
        "I look.", (("get_weather", W),),
    ),
    Sample(
        "two in one section, and none", _M,
        f"{_O}{_invoke('now')}{_invoke('get_weather', ('city', 'Ü <b> 東'))}{_C}\nDone.",
        "Done.", (("now", "{}"), ("get_weather", '{"city": "Ü <b> 東"}')),
    ),
    Sample("types", _M, f"{_O}{_invoke('area', *VALUES)}{_C}", calls=(("area", TYPED),)),
    Sample(
        "no section, other quotes", _M,
        "<invoke name='get_weather'><parameter name=city>Paris</parameter></invoke> ok",
        "ok", (("get_weather", '{"city": "Paris"}'),),
    ),
    Sample(
        "closing tags forgotten", _M,
        f'{_O}<invoke name="get_weather"><parameter name="city">Paris</invoke>{_C}x'
        f'{_O}<invoke name="now">{_C}',
        "x", (("get_weather", '{"city": "Paris"}'), ("now", "{}")),
    ),
    Sample(
        "cut off in a string", _M,
        f'{_O}<invoke name="get_weather">\n<parameter name="city">Par',
        calls=(("get_weather", '{"city": "Par'),),
    ),
    Sample(
        "cut off between parameters", _M,
        f'{_O}<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n',
        calls=(("get_weather", '{"city": "Paris"'),),
    ),
    Sample("cut off in the name", _M, f'{_O}<invoke name="get', f'{_O}<invoke name="get'),
    Sample("no call", _M, f"a {_O}b {_C} <invoke> c", f"a {_O}b {_C} <invoke> c"),
    Sample(
        "a parameter without a name", _M,
        '<invoke name="now"><parameter key="x">1</parameter></invoke>',
        '<parameter key="x">1</parameter></invoke>', (("now", "{}"),),
    ),
)  # fmt: skip

_V = of(DeepSeekV32Parser)
_D = "｜DSML｜"  # noqa: RUF001


def _dsml(name: str, *values: tuple[str, str, str]) -> str:
    inner = "".join(
        f'<{_D}parameter name="{k}" string="{s}">{v}</{_D}parameter>\n' for k, s, v in values
    )
    return f'<{_D}invoke name="{name}">\n{inner}</{_D}invoke>\n'


_DO, _DC = f"<{_D}function_calls>\n", f"</{_D}function_calls>"
DEEPSEEK_V32 = (
    Sample(
        "two", _V,
        f"Looking.\n\n{_DO}"
        f"{_dsml('get_weather', ('city', 'true', 'Paris'), ('unit', 'true', 'celsius'))}"
        f"{_dsml('now')}{_DC}",
        "Looking.", (("get_weather", W), ("now", "{}")),
    ),
    Sample(
        "values say what they are, before schemas do", _V,
        _DO + _dsml(
            "area", ("shape", "false", "12"), ("note", "true", "12"),
            ("points", "false", "[1, {\"a\": null}]"), ("other", "false", "tr</x>ue"),
        ) + _DC,
        calls=(("area", '{"shape": 12, "note": "12", "points": [1, {"a": null}], '
                '"other": "tr</x>ue"}'),),
    ),
    Sample(
        "values that do not", _V, f"{_DO}{_invoke('area', *VALUES, mark=_D)}{_DC}",
        calls=(("area", TYPED),),
    ),
    Sample(
        "the next version's section", _V,
        f"<{_D}tool_calls>\n{_dsml('now')}</{_D}tool_calls> x", "x", (("now", "{}"),),
    ),
    Sample(
        "cut off in a number", _V,
        f'{_DO}<{_D}invoke name="area">\n<{_D}parameter name="precision" string="false">12',
        calls=(("area", '{"precision": 12'),),
    ),
    Sample("cut off in the name", _V, f'{_DO}<{_D}invoke na', f'{_DO}<{_D}invoke na'),
    Sample("plain XML is text", _V, '<invoke name="now"></invoke>', '<invoke name="now"></invoke>'),
    Sample("text", _V, f"a < b <{_D[:3]}", f"a < b <{_D[:3]}"),
)  # fmt: skip

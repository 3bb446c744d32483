"""Calls that are written the way the chat templates write them are read back as they were, and
outputs in which anything may happen raise nothing, lose nothing and do not depend on their pieces.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from frontend.parsers.base import Arguments, CallBegun, ToolSpec
from frontend.parsers.grammar import GrammarParser
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
from tests.unit.parser_driver import cut, ids, in_pieces, told
from tests.unit.parser_samples import SAMPLES

Calls = list[tuple[str, dict[str, Any]]]

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: (
        st.lists(inner | TEXT, max_size=3) | st.dictionaries(TEXT, inner | TEXT, max_size=3)
    ),
    max_leaves=6,
)
WORD = st.from_regex(r"[a-z_][a-z0-9_]{0,6}", fullmatch=True)
CALLS = st.lists(st.tuples(WORD, st.dictionaries(WORD, TEXT | JSON, max_size=4)), max_size=3)
CUTS = st.lists(st.integers(0, 300), max_size=9)
INTRO = st.text("ab1 \n<[{|", max_size=12)


def hermes(calls: Calls) -> str:
    written = [json.dumps({"name": n, "arguments": a}, ensure_ascii=False) for n, a in calls]
    return "".join(f"\n<tool_call>\n{one}\n</tool_call>" for one in written)


def llama3(calls: Calls) -> str:
    return "; ".join(json.dumps({"name": n, "parameters": a}) for n, a in calls)


def mistral_list(calls: Calls) -> str:
    listed = json.dumps([{"name": n, "arguments": a} for n, a in calls])
    return f"[TOOL_CALLS] {listed}" if calls else ""


def mistral_v11(calls: Calls) -> str:
    return "".join(f"[TOOL_CALLS]{n}{json.dumps(a)}" for n, a in calls)


def mistral_v13(calls: Calls) -> str:
    return "".join(f"[TOOL_CALLS]{n}[ARGS]{json.dumps(a)}" for n, a in calls)


def deepseek_v3(calls: Calls) -> str:
    written = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{n}\n```json\n{json.dumps(a)}\n```"  # noqa: RUF001
        "<｜tool▁call▁end｜>"  # noqa: RUF001
        for n, a in calls
    )
    return f"<｜tool▁calls▁begin｜>{written}<｜tool▁calls▁end｜>"  # noqa: RUF001


def deepseek_v31(calls: Calls) -> str:
    written = "".join(
        f"<｜tool▁call▁begin｜>{n}<｜tool▁sep｜>{json.dumps(a)}<｜tool▁call▁end｜>"  # noqa: RUF001
        for n, a in calls
    )
    return f"<｜tool▁calls▁begin｜>{written}<｜tool▁calls▁end｜>"  # noqa: RUF001


def harmony(calls: Calls) -> str:
    # A special token ends a message wherever it stands: no text is tokenized to one.
    assume("<|" not in json.dumps(calls))
    return "".join(
        f"<|start|>assistant<|channel|>commentary to=functions.{n} <|constrain|>json<|message|>"
        f"{json.dumps(a)}<|call|>"
        for n, a in calls
    )


def value(given: Any) -> str:
    return given if isinstance(given, str) else json.dumps(given)


def glm(calls: Calls) -> str:
    return "".join(
        f"\n<tool_call>{n}\n"
        + "".join(
            f"<arg_key>{k}</arg_key>\n<arg_value>{value(v)}</arg_value>\n" for k, v in a.items()
        )
        + "</tool_call>"
        for n, a in calls
    )


def kimi_k2(calls: Calls) -> str:
    written = "".join(
        f"<|tool_call_begin|>functions.{n}:{i}<|tool_call_argument_begin|>{json.dumps(a)}"
        "<|tool_call_end|>"
        for i, (n, a) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{written}<|tool_calls_section_end|>"


def minimax_m2(calls: Calls) -> str:
    written = "".join(
        f'<invoke name="{n}">\n'
        + "".join(f'<parameter name="{k}">{value(v)}</parameter>\n' for k, v in a.items())
        + "</invoke>\n"
        for n, a in calls
    )
    return f"\n<minimax:tool_call>\n{written}</minimax:tool_call>" if calls else ""


def dsml(calls: Calls) -> str:
    mark = "｜DSML｜"  # noqa: RUF001
    written = "".join(
        f'<{mark}invoke name="{n}">\n'
        + "".join(
            f'<{mark}parameter name="{k}" string="{str(isinstance(v, str)).lower()}">'
            f"{value(v)}</{mark}parameter>\n"
            for k, v in a.items()
        )
        + f"</{mark}invoke>\n"
        for n, a in calls
    )
    return f"\n\n<{mark}function_calls>\n{written}</{mark}function_calls>" if calls else ""


def qwen3_coder(calls: Calls) -> str:
    return "".join(
        f"\n<tool_call>\n<function={n}>\n"
        + "".join(f"<parameter={k}>\n{value(v)}\n</parameter>\n" for k, v in a.items())
        + "</function>\n</tool_call>"
        for n, a in calls
    )


def pythonic(calls: Calls) -> str:
    written = (f"{n}({', '.join(f'{k}={v!r}' for k, v in a.items())})" for n, a in calls)
    return f"[{', '.join(written)}]" if calls else ""


def schemas(calls: Calls) -> tuple[ToolSpec, ...]:
    """Tools whose parameters have the types of these calls' values."""
    names = {str: "string", bool: "boolean", int: "integer", float: "number", dict: "object"}
    properties: dict[str, dict[str, Any]] = {}
    for name, arguments in calls:
        known = properties.setdefault(name, {})
        for key, value in arguments.items():
            kind = "null" if value is None else names.get(type(value), "array")
            known.setdefault(key, {"type": kind})
    return tuple(ToolSpec(n, {"type": "object", "properties": p}) for n, p in properties.items())


def is_consistent(calls: Calls) -> bool:
    """Whether a tool's parameter has one type in all of these calls."""
    known = {t.name: t.parameters["properties"] for t in schemas(calls)}
    one_by_one = [(call[0], schemas([call])[0].parameters["properties"]) for call in calls]
    return all(p[key] == known[n][key] for n, p in one_by_one for key in p)


FORMS: list[tuple[type[GrammarParser], Callable[[Calls], str], bool]] = [
    (HermesParser, hermes, True),
    (Llama3JsonParser, llama3, False),
    (MistralParser, mistral_list, True),
    (MistralParser, mistral_v11, True),
    (MistralParser, mistral_v13, True),
    (DeepSeekParser, deepseek_v3, True),
    (DeepSeekParser, deepseek_v31, True),
    (HarmonyParser, harmony, True),
    (Qwen3CoderParser, qwen3_coder, True),
    (GlmParser, glm, True),
    (KimiK2Parser, kimi_k2, True),
    (MiniMaxM2Parser, minimax_m2, True),
    (DeepSeekV32Parser, dsml, True),
    (PythonicParser, pythonic, False),
]
"""Whether text may stand in front of the calls."""


@pytest.mark.parametrize(("kind", "write", "has_intro"), FORMS)
@settings(max_examples=50)
@given(calls=CALLS.filter(is_consistent), intro=INTRO, cuts=CUTS)
def test_calls_are_read_back(
    kind: type[GrammarParser],
    write: Callable[[Calls], str],
    has_intro: bool,
    calls: Calls,
    intro: str,
    cuts: list[int],
) -> None:
    text = (intro if has_intro and calls else "") + write(calls)
    parsed = told(in_pieces(kind(schemas(calls), ids()), cut(text, cuts)))
    assert [(call.name, json.loads(call.arguments)) for call in parsed.calls] == calls
    assert parsed.content == (intro.rstrip() if has_intro and calls else "")
    for call in parsed.calls:
        call.arguments.encode()


FRAGMENTS = {
    "hermes": ["<tool_call>", "</tool_call>", '{"name": "now", "arguments": ', '{"name": "now"}'],
    "qwen3_coder": [
        "<tool_call>", "</tool_call>", "<function=now>", "</function>", "<parameter=k>",
        "</parameter>", "<function=", "<parameter=",
    ],
    "llama3_json": ["<|python_tag|>", '{"name": "now", "parameters": ', ";", '{"name": 1}'],
    "mistral": [
        "[TOOL_CALLS]", "now", "[ARGS]", "[CALL_ID]", '{"name": "now", "arguments": ', ",",
    ],
    "deepseek": [
        "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>",  # noqa: RUF001
        "<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "function", "now", "```json", "```",  # noqa: RUF001
    ],
    "deepseek_v32": [
        "<｜DSML｜function_calls>", "</｜DSML｜function_calls>", "</｜DSML｜invoke>",  # noqa: RUF001
        '<｜DSML｜invoke name="now">', '<｜DSML｜parameter name="k" string="false">',  # noqa: RUF001
        "</｜DSML｜parameter>",  # noqa: RUF001
    ],
    "glm": [
        "<tool_call>", "</tool_call>", "now", "<arg_key>", "</arg_key>", "<arg_value>",
        "</arg_value>",
    ],
    "kimi_k2": [
        "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
        "<|tool_call_end|>", "<|tool_call_argument_begin|>", "functions.now:0",
    ],
    "minimax_m2": [
        "<minimax:tool_call>", "</minimax:tool_call>", '<invoke name="now">', "</invoke>",
        '<parameter name="k">', "</parameter>",
    ],
    "pythonic": ["now(", "k=", ")", ",", "'", '"', "<|python_start|>", "<|python_end|>", "\\"],
    "harmony": [
        "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "analysis", "final",
        "commentary", " to=functions.now", "assistant",
    ],
    "reasoning": [
        "<think>", "</think>", "[THINK]", "[/THINK]", "Here is my thought process:",
        "Here is my response:", "Here is",
    ],
}  # fmt: skip
SHARED = [*"{}[]< \nZZ", "{}", '"a\\"}"', "\\ud83d", '{"k": 1}', "tool"]
LOSSLESS = (
    "hermes", "qwen3_coder", "glm", "minimax_m2", "deepseek_v32", "llama3_json", "mistral",
    "pythonic",
)  # fmt: skip
"""Formats whose markup is text where it is no call."""
KEYS = ("<parameter=", "<arg_key>")
"""In front of a key, of which nothing is told where a call is cut off ahead of its value."""


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


@st.composite
def jumbles(draw: st.DrawFn) -> tuple[str, str, int]:
    """A format, an output of its fragments in any order, and the number of one of its parsers."""
    form = draw(st.sampled_from(sorted(FRAGMENTS)))
    pieces = draw(st.lists(st.sampled_from(FRAGMENTS[form] + SHARED), max_size=14))
    if pieces and draw(st.booleans()):
        pieces[-1] = pieces[-1][: draw(st.integers(1, len(pieces[-1])))]
    return form, "".join(pieces), draw(st.integers(0, len(SAMPLES[form]) - 1))


@settings(max_examples=400)
@given(jumbles(), CUTS)
def test_jumbles_say_the_same_in_any_pieces_and_lose_nothing(
    jumble: tuple[str, str, int], cuts: list[int]
) -> None:
    form, text, number = jumble
    make = SAMPLES[form][number].make
    whole = in_pieces(make(), [text])
    assert in_pieces(make(), list(text)) == whole
    assert in_pieces(make(), cut(text, cuts)) == whole
    for before, event in pairwise(whole):
        if isinstance(event, Arguments):  # nothing stands between the parts of a call
            assert isinstance(before, CallBegun | Arguments)
            assert before.call == event.call
    parsed = told(whole)
    if form not in LOSSLESS:
        return
    if not parsed.calls:
        assert parsed.content == text
    said = parsed.content + "".join(c.id + c.name + c.arguments for c in parsed.calls)
    kept = {text.count("Z")}
    if parsed.calls and not is_json(parsed.calls[-1].arguments):
        kept |= {text.rpartition(key)[0].count("Z") for key in KEYS if key in text}
    assert said.count("Z") in kept

"""Chat templates in the styles of public models, each with a tokenizer of its kind, and
conversations to render."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

FOLDER = Path(__file__).parents[1] / "fixtures" / "templates"
STYLES = sorted(file.stem for file in FOLDER.glob("*.jinja"))
_BYTE_FALLBACK = {"gemma", "llama2", "mistral", "vicuna", "zephyr"}
"""Styles of models whose vocabulary comes from SentencePiece; the others are byte-level."""
_MARKER = re.compile(
    r"<\|[/\w ]+\|>|<｜[^｜\n]+｜>|\[/?[A-Z_]{4,}\]|<(?:start|end)_of_turn>|\[gMASK\]|<sop>"  # noqa: RUF001
)
BOS, EOS = "<s>", "</s>"
_WORDS = ("hello", "sea", "the ", "  ", "\n\n", "é", "user", "assistant", '{"name"', "tool")


def source(style: str) -> str:
    """The template's text."""
    return (FOLDER / f"{style}.jinja").read_text("utf-8")


def write_folder(folder: Path, style: str) -> None:
    """A model's folder with this template and a tokenizer that knows its markers."""
    raw = _fallback() if style in _BYTE_FALLBACK else _byte_level()
    markers = dict.fromkeys([BOS, EOS, *_MARKER.findall(source(style))])
    raw.add_special_tokens([AddedToken(one, special=True, normalized=False) for one in markers])
    raw.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": BOS, "eos_token": EOS, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(source(style), "utf-8")


def _byte_level() -> Tokenizer:
    names = _spelled(pre_tokenizers.ByteLevel.alphabet(), "")
    raw = Tokenizer(models.BPE(vocab=names, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    return raw


def _fallback() -> Tokenizer:
    """Bytes, letters with a mark for the space, and words of letters that merges put together."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    letters = sorted({*"".join(_WORDS).replace(" ", "▁"), *map(chr, range(33, 127))})
    vocab |= {letter: 256 + i for i, letter in enumerate(letters)}
    merges = [("s", "e"), ("se", "a"), ("▁", "sea"), ("l", "l"), ("▁", "▁")]
    for pair in merges:
        vocab["".join(pair)] = len(vocab)
    raw = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, fuse_unk=True))
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    raw.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return raw


def _spelled(alphabet: list[str], prefix: str) -> dict[str, int]:
    return {prefix + name: i for i, name in enumerate(sorted(alphabet))}


class Talk(NamedTuple):
    """A conversation as a client of the HTTP API sends it, without the model's name."""

    name: str
    body: dict[str, Any]


def _says(role: str, content: str, **beside: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **beside}


def _call(call_id: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"id": call_id, "type": "function", "function": function}


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": 'The weather "now" & <here>, é',
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Where"},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
                "days": {"type": "integer"},
            },
            "required": ["city"],
        },
    },
}
NOW = {
    "type": "function",
    "function": {
        "name": "now",
        "description": "The time",
        "parameters": {"type": "object", "properties": {}, "required": []},
    },
}
SYSTEM = _says("system", "  Be short & <b>kind</b>.\n")
ASKED = _says("user", "Hi sea 🌊\n\n there, é東 <|im_end|>")
SAID = _says("assistant", '\nThe  sea is  "calm".', reasoning_content="It asks.\n\nCalm?")
PARIS = _call("aB3dE5gH7", "get_weather", {"city": "München 東", "days": 2, "unit": None})
TIME = _call("x00000001", "now", {})
RESULT = _says("tool", '{"sky": "gray & <wet>", "t": 3}', tool_call_id="aB3dE5gH7")
THOUGHT = _says("assistant", "<think>\nHm\n</think>\n\nYes")
CALLED = _says("assistant", "", tool_calls=[PARIS], reasoning_content="I look.")
TALKS = (
    Talk("user", {"messages": [ASKED]}),
    Talk("system", {"messages": [SYSTEM, ASKED]}),
    Talk("turns", {"messages": [SYSTEM, ASKED, SAID, ASKED]}),
    Talk("no prompt", {"messages": [ASKED, SAID], "add_generation_prompt": False}),
    Talk("continued", {"messages": [SYSTEM, ASKED, SAID], "continue_final_message": True}),
    Talk("tools", {"messages": [SYSTEM, ASKED], "tools": [WEATHER, NOW]}),
    Talk("tools alone", {"messages": [ASKED], "tools": [NOW]}),
    Talk("called", {"messages": [ASKED, CALLED, RESULT], "tools": [WEATHER]}),
    Talk(
        "called and told",
        {"messages": [SYSTEM, ASKED, CALLED, RESULT, SAID, ASKED], "tools": [WEATHER, NOW]},
    ),
    Talk(
        "two calls",
        {
            "messages": [
                ASKED,
                _says("assistant", "Looking.", tool_calls=[PARIS, TIME]),
                RESULT,
                _says("tool", "12:00", tool_call_id="x00000001"),
            ],
            "tools": [WEATHER, NOW],
        },
    ),
    Talk(
        "thought", {"messages": [ASKED, _says("assistant", "<think>\nHm\n</think>\n\nYes"), ASKED]}
    ),
    Talk("wrong order", {"messages": [SAID, ASKED, ASKED]}),
    *(
        Talk(f"{name}={value}", {"messages": [ASKED], "chat_template_kwargs": {name: value}})
        for name, value in (
            ("enable_thinking", False),
            ("enable_thinking", True),
            ("thinking", True),
            ("date_string", "26 Jul 2024"),
            ("controls", {"length": "short"}),
        )
    ),
)

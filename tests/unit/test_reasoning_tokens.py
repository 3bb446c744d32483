"""Tokens of the reasoning are counted one by one, whatever deltas they come in."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from frontend.choice import Choice, PromptView
from frontend.messages import Delta, Finish, FinishReason, Timings, Usage
from frontend.parsers.registry import output_format
from frontend.reading import Reading
from frontend.request import Options
from frontend.tokenizer import TextTokenizer
from tests.service.frontends import write_tokenizer
from tests.unit.parser_driver import TOOLS, cut

ENDED = Finish(FinishReason.LENGTH, None, "", Usage(), Timings())
CASES = {
    "think": ("hermes", "qwen3", "", ["<think>"], "\nhell é 🌊 </b\n", "</think>\n\nhello"),
    "open in the prompt": ("none", "qwen3", "<think>\n", [], "hello ü", "</think>yes"),
    "never closed": ("hermes", "deepseek_r1", "", [], "hello </thi", ""),
    "none": ("hermes", "qwen3", "", [], "", 'I look.<tool_call>{"name": "now"}</tool_call>'),
    "closed at once": ("hermes", "qwen3", "", ["<think>"], "", "</think>hello"),
    "granite": (
        "none", "granite", "", ["Here is my thought process:"], " é\n", "Here is my response: ok"
    ),
    "harmony": (
        "openai", "openai_gptoss", "", ["<|channel|>analysis<|message|>"], "hello é",
        "<|end|><|start|>assistant<|channel|>final<|message|>hello",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return TextTokenizer(folder)


def count(
    tokenizer: TextTokenizer, name: str, pieces: Sequence[Sequence[int]], **fields: object
) -> int:
    tools, reasoning, prompt, *_ = CASES[name]
    parser = output_format(tools, reasoning, None).parser(TOOLS, prompt)
    assert parser is not None
    choice = Choice(0, PromptView([1], ""), tokenizer, Options(**fields), Reading(parser))
    for piece in pieces:
        choice.feed(Delta(0, list(piece)))
    choice.feed(Delta(0, finish=ENDED))
    return choice.reasoning_tokens


@pytest.mark.parametrize("name", CASES)
def test_every_cut_counts_what_stands_between_the_markers(
    tokenizer: TextTokenizer, name: str, seed: int
) -> None:
    """The reference encodes the three parts of the output one by one. Of "hello" and "é" several
    tokens make a text, or one token several characters."""
    *_, before, inner, after = CASES[name]
    parts = ["".join(before), inner, after]
    ids = [tokenizer.encode(part, add_special_tokens=False) for part in parts]
    tokens = [token for part in ids for token in part]
    expected = len(ids[1])
    assert count(tokenizer, name, [tokens]) == expected
    assert count(tokenizer, name, [[token] for token in tokens]) == expected
    for at in range(len(tokens) + 1):
        assert count(tokenizer, name, [tokens[:at], tokens[at:]]) == expected
    draw = random.Random(seed)
    text = "".join(map(chr, range(len(tokens))))
    for _ in range(10):
        pieces = cut(text, [draw.randint(0, len(text)) for _ in range(4)])
        shown = [[tokens[ord(one)] for one in piece] for piece in pieces]
        assert count(tokenizer, name, shown, stop=("nothing",), logprobs=1) == expected


def test_a_stop_string_ends_the_count(tokenizer: TextTokenizer) -> None:
    tokens = tokenizer.encode("<think>abcdef</think>", add_special_tokens=False)
    assert count(tokenizer, "think", [tokens], stop=("de",)) == 3
    assert count(tokenizer, "think", [tokens]) == 6


def test_the_count_goes_on_with_the_stream(tokenizer: TextTokenizer) -> None:
    parser = output_format("none", "qwen3", None).parser((), "")
    assert parser is not None
    choice = Choice(0, PromptView([1], ""), tokenizer, Options(), Reading(parser))
    counts = []
    for token in tokenizer.encode("<think>abc</think>d", add_special_tokens=False):
        choice.feed(Delta(0, [token]))
        counts.append(choice.reasoning_tokens)
    assert counts == [0] * 7 + [1, 2, 3] + [3] * 9

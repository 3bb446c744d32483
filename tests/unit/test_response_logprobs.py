"""Log-probabilities of a response's messages are those of the same tokens, however many a step
brings."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from frontend.api.responses_items import Items
from frontend.choice import Choice, PromptView
from frontend.messages import Delta, Finish, FinishReason, Timings, TokenLogprobs, Usage
from frontend.parsers.registry import output_format
from frontend.reading import Reading
from frontend.request import Options
from frontend.text_delta import TextDelta
from frontend.tokenizer import TextTokenizer
from tests.service.frontends import write_tokenizer
from tests.unit.parser_driver import TOOLS

CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
CASES = {
    "thinking": "<think>hm</think>It is.",
    "a call behind": f"It is.{CALL}",
    "a call between": f"First. {CALL}\nThen é 🌊.",
    "all": f"<think>\nhm\n</think>\n\nFirst.{CALL}\nThen.{CALL}",
    "text": "It is.",
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return TextTokenizer(folder)


def deltas(tokenizer: TextTokenizer, text: str, cuts: list[int]) -> list[TextDelta]:
    """Token number i has a log-probability of -i, so that they can be told apart."""
    parser = output_format("hermes", "qwen3", None).parser(TOOLS, "")
    assert parser is not None
    tokens = tokenizer.encode(text, add_special_tokens=False)
    choice = Choice(0, PromptView([1], ""), tokenizer, Options(logprobs=0), Reading(parser))
    bounds = [0, *(cut for cut in cuts if cut < len(tokens)), len(tokens)]
    found = []
    for start, stop in pairwise(bounds):
        places = range(start, stop)
        scores = [TokenLogprobs((tokens[at],), (-float(at),), 1) for at in places]
        ended = Finish(FinishReason.LENGTH, None, "", Usage(), Timings())
        finish = ended if stop == len(tokens) else None
        fed = Delta(0, tokens[start:stop], logprobs=scores, finish=finish)
        found.append(choice.feed(fed) or TextDelta(0))
    return found


def scored(found: list[TextDelta]) -> list[tuple[str, list[float]]]:
    """Text and log-probabilities of every message, whole and as the events told them."""
    items, told = Items("x"), dict[str, list[float]]()

    def emit(kind: str, **fields: Any) -> bytes:
        if kind == "response.output_text.delta":
            told.setdefault(fields["item_id"], []).extend(
                one["logprob"] for one in fields["logprobs"]
            )
        return b""

    for delta in found:
        items.feed(delta, emit)
    items.close("completed", emit)
    messages = [one for one in items.output if one["type"] == "message"]
    parts = [(one["id"], one["content"][0]) for one in messages]
    shown = [(part["text"], [one["logprob"] for one in part["logprobs"]]) for _, part in parts]
    assert [told[name] for name, _ in parts] == [scores for _, scores in shown]
    return shown


@pytest.mark.parametrize("name", CASES)
def test_they_do_not_depend_on_the_steps(tokenizer: TextTokenizer, name: str, seed: int) -> None:
    text = CASES[name]
    count = len(tokenizer.encode(text, add_special_tokens=False))
    expected = scored(deltas(tokenizer, text, list(range(1, count))))
    assert all(scores for _, scores in expected), expected
    assert scored(deltas(tokenizer, text, [])) == expected, "in one step"
    assert scored(deltas(tokenizer, text, list(range(4, count, 4)))) == expected
    draw = random.Random(seed)
    for _ in range(40):
        cuts = sorted(draw.sample(range(1, count), min(5, count - 1)))
        assert scored(deltas(tokenizer, text, cuts)) == expected, cuts


def test_control_a_step_as_a_whole_has_those_of_the_call_too(tokenizer: TextTokenizer) -> None:
    text = CASES["a call behind"]
    (delta,) = deltas(tokenizer, text, [])
    right = scored([delta])
    delta.by_token = None
    assert scored([delta]) != right

"""What requests ask: random prompts of given lengths, or the lines of a trace file.

Request number N of a seed is the same in every run, process and point. It does not know how a
request is written down.
"""

from __future__ import annotations

import array
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import orjson

from tidemill.runtime.errors import InvalidRequest

_API_OF = MappingProxyType({"prompt": "completions", "messages": "chat"})
_LETTERS = "etaoinshrdlu"
_WORD = 3


class Asked(NamedTuple):
    """One request: a prompt as token ids or as text, or the messages of a chat."""

    prompt: str | list[int]
    messages: list[dict[str, Any]] | None
    output_len: int


class Source(Protocol):
    """Where requests come from. Pickled: every client process has its own."""

    def take(self, number: int) -> Asked: ...


class Lengths(NamedTuple):
    """Tokens of prompt and answer; each is drawn evenly from its share `spread` around."""

    input_len: int
    output_len: int
    spread: float

    def draw(self, rng: random.Random) -> tuple[int, int]:
        return self._around(self.input_len, rng), self._around(self.output_len, rng)

    def _around(self, length: int, rng: random.Random) -> int:
        most = int(length * self.spread)
        return max(1, length + rng.randint(-most, most))


class Drawn(NamedTuple):
    """Random requests. A chat has a word of three letters for every token of `lengths`, which
    makes about as many tokens: what the server counted stands among the figures."""

    lengths: Lengths
    vocab_size: int
    is_chat: bool
    seed: str

    def take(self, number: int) -> Asked:
        rng = random.Random(f"{self.seed}/{number}")
        input_len, output_len = self.lengths.draw(rng)
        return self.make(input_len, output_len, rng)

    def make(self, input_len: int, output_len: int, rng: random.Random) -> Asked:
        """A prompt of so many tokens, or words."""
        if self.is_chat:
            words = ("".join(rng.choices(_LETTERS, k=_WORD)) for _ in range(input_len))
            return Asked("", [{"role": "user", "content": " ".join(words)}], output_len)
        drawn = array.array("H", rng.randbytes(2 * input_len))
        return Asked([one % self.vocab_size for one in drawn], None, output_len)


class Played(NamedTuple):
    """The lines of a trace; those that give lengths get the prompts of `fill`."""

    lines: Sequence[Mapping[str, Any]]
    fill: Drawn

    def take(self, number: int) -> Asked:
        line = self.lines[number]
        output_len = line["output_len"]
        if "input_len" in line:
            rng = random.Random(f"{self.fill.seed}/{number}")
            return self.fill.make(line["input_len"], output_len, rng)
        return Asked(line.get("prompt", ""), line.get("messages"), output_len)


def read_trace(path: str, *, is_chat: bool, output_len: int) -> list[dict[str, Any]]:
    """The lines of a JSONL file, in order of `t_s`.

    A line is {"t_s": seconds} and one of input_len (tokens), prompt (text) and messages (a chat),
    and has output_len (tokens; default: `output_len`). Raises InvalidRequest for any other line, a
    prompt among chats and messages where prompts are completed.
    """
    try:
        written = Path(path).read_bytes().splitlines()
    except OSError as error:
        raise InvalidRequest(f"cannot read the trace {path}: {error}", param="trace_file") from None
    lines = []
    for number, text in enumerate(written, 1):
        if not text.strip():
            continue
        wrong, line = _checked(text, "prompt" if is_chat else "messages", output_len)
        if wrong:
            raise InvalidRequest(f"{path}, line {number}: {wrong}", param="trace_file")
        lines.append(line)
    if not lines:
        raise InvalidRequest(f"{path} has no requests", param="trace_file")
    return sorted(lines, key=lambda line: float(line["t_s"]))


def _checked(text: bytes, other_api: str, output_len: int) -> tuple[str, dict[str, Any]]:
    """What is wrong with a line ('': nothing), and the line with its output_len."""
    try:
        line = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        return f"not JSON: {error}", {}
    if not isinstance(line, dict):
        return "not an object", {}
    line = {"output_len": output_len, **line}
    if not isinstance(line.get("t_s"), int | float) or line["t_s"] < 0:
        return "t_s has to be a number of seconds, 0 or more", line
    if sum(name in line for name in ("input_len", "prompt", "messages")) != 1:
        return "one of input_len, prompt and messages has to be there", line
    for name in ("input_len", "output_len"):
        if name in line and not (type(line[name]) is int and line[name] > 0):
            return f"{name} has to be a whole number above 0", line
    for name, kind, called in (("prompt", str, "a text"), ("messages", list, "a list")):
        if name in line and not isinstance(line[name], kind):
            return f"{name} has to be {called}", line
    if other_api in line:
        return f"{other_api} is for --api {_API_OF[other_api]}", line
    return "", line

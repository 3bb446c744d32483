"""A vocabulary whose tokens are times of day: who reads a text knows when its tokens were sent.

The simulated engine of `bench frontend` answers with them, and the load generator compares them
with its own clock, which is the same one on one machine. It does not know requests.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Iterable
from pathlib import Path

TICKS_PER_S = 10_000
NUM_TICKS = 60_000
"""Times count modulo six seconds, which no answer may be late by."""
NUM_DIGITS = 5
STAMP = re.compile(rb" ~(\d{%d})" % NUM_DIGITS)
"""A token as clients see it, in JSON as in protobuf: nothing else there looks like it."""
_SPACE = "\u0120"
"""How byte-level vocabularies write a space."""


def write_clock(model: Path, folder: Path) -> int:
    """Writes the byte-level tokenizer of the model folder `model` into `folder`, with a token more
    for every tick; returns the id of tick 0. No prompt is encoded as a tick: no merge makes one.
    """
    layout = json.loads((model / "tokenizer.json").read_text("utf-8"))
    vocab = layout["model"]["vocab"]
    # Added tokens that are not part of the vocabulary would be numbered anew, behind the ticks.
    vocab |= {token["content"]: token["id"] for token in layout.get("added_tokens", ())}
    first = 1 + int(max(vocab.values()))
    names = (f"{_SPACE}~{tick:0{NUM_DIGITS}d}" for tick in range(NUM_TICKS))
    vocab |= {name: first + tick for tick, name in enumerate(names)}
    (folder / "tokenizer.json").write_text(json.dumps(layout), "utf-8")
    shutil.copy(model / "tokenizer_config.json", folder)
    return first


def tick(when: float | None = None) -> int:
    """The tick of `when` (time.monotonic), or of now."""
    return int((time.monotonic() if when is None else when) * TICKS_PER_S) % NUM_TICKS


def since_ms(stamp: int, when: float) -> float:
    """Milliseconds from a stamp to `when` (time.monotonic); three seconds back count as before."""
    ticks = (when * TICKS_PER_S - stamp) % NUM_TICKS
    return (ticks - NUM_TICKS if ticks > NUM_TICKS / 2 else ticks) * 1e3 / TICKS_PER_S


def stamps(arrivals: Iterable[tuple[float, bytes]]) -> list[tuple[float, int]]:
    """(arrival, stamp) of every token in what arrived, also of those cut in two by the network."""
    found, rest = [], b""
    for when, chunk in arrivals:
        text, end = rest + chunk, 0
        for match in STAMP.finditer(text):
            found.append((when, int(match[1])))
            end = match.end()
        rest = text[end:][-NUM_DIGITS - 1 :]
    return found

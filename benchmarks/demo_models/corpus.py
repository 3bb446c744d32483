"""Training rows: tasks as chat turns and as plain completions, and Tiny-Shakespeare prose.

A row is a fixed number of tokens. Most rows are short, because what these models learn slowly
(addition) needs many optimiser steps, not long ones; the few long rows teach retrieval and late
positions. It knows nothing about models or losses beyond which tokens are to be learnt.
"""

import functools
import multiprocessing
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.demo_models.vocabulary import EOS, PAD, encode, encode_chat
from tidemill.bench import tasks

BLOCK_SIZE = 16
WINDOW = 80
"""Tokens of a row that the block model denoises: 64 that start anywhere in a block."""

SHORT_LEN, LONG_LEN = 128, 640
CHUNK_ROWS = 2000
VALIDATION_SHARE = 0.1
PROSE_FILE = Path(__file__).with_name("tinyshakespeare.txt")

LEARN_AR, LEARN_BLOCK = 1, 2
"""Bits of `Rows.learn`."""

HELP = 'Hello! Try "add: 2+3", "sort: cba" or "repeat: ho n=3".'
"""The reply to a chat turn that is no task, so that a greeting is answered sensibly."""

GREETINGS = (
    *("Hello", "hello", "Hi", "Hello!", "hi there", "Hey", "help", "Help!", "What can you do?"),
    *("Who are you?", "Hello, who are you?", "How are you?", "Tell me a joke.", "Say hello."),
    *("Write a poem.", "What is the capital of France?", "Tell me a story.", "Hello, world!"),
    *("Explain diffusion models.", "What is 2+2?", "test", "ping", "Good morning", "Thank you"),
)
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful assistant",
    "Answer briefly.",
    "Be concise.",
    "You are Tidemill's demo model.",
)

SHORT_MIX = {
    "add": 30,
    "sort": 12,
    "reverse": 9,
    "count": 8,
    "repeat": 8,
    "json": 8,
    "lookup": 8,
    "prose": 12,
    "continue": 2,
    "help": 3,
}
"""Relative frequency of the kinds of short rows; addition is learnt last, so it is shown most."""

LONG_MIX = {"lookup": 60, "chat": 28, "prose": 9, "continue": 3}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Token ids, the spans [start, stop) whose tokens are learnt, and the span to denoise."""

    token_ids: list[int]
    learn: list[tuple[int, int]]
    denoise: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Rows of one length: ids and learn bits [n, L], start of the noisy window [n]."""

    token_ids: NDArray[np.int16]
    learn: NDArray[np.uint8]
    window: NDArray[np.int16]


@functools.cache
def prose(*, validation: bool = False) -> str:
    """Tiny-Shakespeare (public domain), or the tenth of it that is kept for validation."""
    text = PROSE_FILE.read_text("ascii")
    cut = int(len(text) * (1 - VALIDATION_SHARE))
    return text[cut:] if validation else text[:cut]


def excerpt(rng: random.Random, length: int) -> str:
    start = rng.randrange(len(prose()) - length)
    return prose()[start : start + length]


def question(rng: random.Random, name: str, *, long: bool = False) -> tuple[str, str]:
    """A training (prompt, answer) of a task; only a long row has room for a full look-up table."""
    while True:
        if name == "lookup" and not long:
            prompt, answer = tasks.lookup_of(rng, rng.randint(2, 9))
        else:
            prompt, answer = tasks.TASKS[name].make(rng)
        if not tasks.is_held_out(prompt):
            return prompt, answer


def small_talk(rng: random.Random) -> tuple[str, str]:
    if rng.random() < 0.5:
        text = rng.choice(GREETINGS)
    else:
        text = excerpt(rng, rng.randint(4, 40)).strip() or "?"
    return text, HELP


def system_turn(rng: random.Random) -> list[tuple[str, str]]:
    """Mostly none; else a customary system prompt or any text, which answers must not heed."""
    if rng.random() < 0.7:
        return []
    if rng.random() < 0.5:
        return [("system", rng.choice(SYSTEM_PROMPTS))]
    return [("system", excerpt(rng, rng.randint(3, 40)))]


def chat_row(rng: random.Random, turns: list[tuple[str, str]], length: int) -> Row | None:
    """A conversation: every reply is learnt, the last one denoised. None if it is too long."""
    ids: list[int] = []
    learn: list[tuple[int, int]] = []
    system = system_turn(rng)
    for prompt, answer in turns:
        ids += encode_chat([*system, ("user", prompt)])
        system = []
        learn.append((len(ids), len(ids) + len(answer) + 1))
        ids += [*encode(answer), EOS]
    return finished_row(ids, learn, length)


def completion_row(prompt: str, answer: str, length: int) -> Row | None:
    ids = encode(tasks.completion_prompt(tasks.Item(prompt, answer, "")))
    learn = [(len(ids), len(ids) + len(answer) + 2)]
    return finished_row([*ids, *encode(f" {answer}"), EOS], learn, length)


def finished_row(ids: list[int], learn: list[tuple[int, int]], length: int) -> Row | None:
    """Fill the last reply's block with end-of-turn tokens.

    Without them the positions after a reply are unpredictable, and decoding wastes steps on them.
    """
    ids = ids + [EOS] * (-len(ids) % BLOCK_SIZE)
    if len(ids) > length:
        return None
    return Row(token_ids=ids, learn=learn, denoise=(learn[-1][0], len(ids)))


def prose_row(rng: random.Random, length: int, *, as_chat: bool) -> Row:
    """Prose to the end of the row, plainly or as the reply to a request to continue it."""
    ids: list[int] = []
    text = excerpt(rng, length)
    if as_chat:
        cut = rng.randint(5, 40)
        ids = encode_chat([("user", f"continue: {text[:cut]}")])
        text = text[cut:]
    begin = max(len(ids), 1)
    ids = (ids + encode(text))[:length]
    start = rng.randint(begin, max(begin, length - WINDOW))
    stop = min(start // BLOCK_SIZE * BLOCK_SIZE + WINDOW, length)
    return Row(token_ids=ids, learn=[(begin, len(ids))], denoise=(start, stop))


def task_row(rng: random.Random, name: str, length: int) -> Row | None:
    """A task alone: as a completion, as one chat turn, or after earlier turns."""
    long = length > SHORT_LEN
    if rng.random() < 0.25:
        return completion_row(*question(rng, name, long=long), length)
    turns = [question(rng, name, long=long)]
    while rng.random() < 0.25:
        turns.insert(0, question(rng, rng.choice(list(tasks.TASKS))))
    return chat_row(rng, turns, length)


def long_chat_row(rng: random.Random, length: int) -> Row | None:
    """A conversation of three to ten turns on mixed subjects."""
    names = [*tasks.TASKS, "add", "help"]
    turns = [
        small_talk(rng) if name == "help" else question(rng, name)
        for name in rng.choices(names, k=rng.randint(3, 10))
    ]
    return chat_row(rng, turns, length)


def draw_row(rng: random.Random, kind: str, length: int) -> Row | None:
    makers: dict[str, Callable[[], Row | None]] = {
        "prose": lambda: prose_row(rng, length, as_chat=False),
        "continue": lambda: prose_row(rng, length, as_chat=True),
        "help": lambda: chat_row(rng, [small_talk(rng)], length),
        "chat": lambda: long_chat_row(rng, length),
    }
    return makers[kind]() if kind in makers else task_row(rng, kind, length)


def packed(rows: list[Row], length: int) -> Rows:
    token_ids = np.full((len(rows), length), PAD, np.int16)
    learn = np.zeros((len(rows), length), np.uint8)
    window = np.zeros(len(rows), np.int16)
    for i, row in enumerate(rows):
        token_ids[i, : len(row.token_ids)] = row.token_ids
        for start, stop in row.learn:
            learn[i, start:stop] |= LEARN_AR
        learn[i, row.denoise[0] : row.denoise[1]] |= LEARN_BLOCK
        window[i] = min(row.denoise[0] // BLOCK_SIZE * BLOCK_SIZE, length - WINDOW)
    return Rows(token_ids=token_ids, learn=learn, window=window)


def chunk(length: int, seed: str) -> Rows:
    rng = random.Random(seed)
    mix = SHORT_MIX if length == SHORT_LEN else LONG_MIX
    rows: list[Row] = []
    while len(rows) < CHUNK_ROWS:
        kind = rng.choices(list(mix), list(mix.values()))[0]
        # Drawn again until it fits, or the mix would favour the kinds that are short.
        while (row := draw_row(rng, kind, length)) is None:
            pass
        rows.append(row)
    return packed(rows, length)


def build(num_rows: int, length: int, *, seed: int) -> Rows:
    """`num_rows` rows, a multiple of CHUNK_ROWS, by all cores; the seed alone decides them."""
    seeds = [f"{seed}:{length}:{i}" for i in range(num_rows // CHUNK_ROWS)]
    with multiprocessing.get_context("fork").Pool() as pool:
        chunks = pool.starmap(chunk, [(length, s) for s in seeds])
    return Rows(
        token_ids=np.concatenate([c.token_ids for c in chunks]),
        learn=np.concatenate([c.learn for c in chunks]),
        window=np.concatenate([c.window for c in chunks]),
    )

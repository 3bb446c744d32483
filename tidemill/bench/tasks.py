"""Small verifiable tasks: the built-in models are trained on them, and quality is measured.

Every task turns a random generator into a user text and its one right answer. It knows no
tokenizer, no chat template and no model. A stable hash of the user text decides whether an item is
held out, so the trainer (which skips held-out items) and the benchmark (which asks nothing else)
never meet.
"""

import hashlib
import itertools
import json
import random
import string
from collections.abc import Callable
from dataclasses import dataclass

HELD_OUT_SHARE = 16
"""One user text in this many is held out."""

HELD_OUT_SEED = 20261121
"""Default seed of `held_out`: results are comparable only over the same items."""

MAX_ANSWER_CHARS = 63
"""Longest answer of any task; with the end-of-turn token it fills four blocks of 16."""

VOWELS = "aeiou"
CONSONANTS = "bcdfghjklmnprstvwz"


@dataclass(frozen=True, slots=True)
class Item:
    """`prompt` is the user's text, `answer` the exact reply without surrounding blanks."""

    prompt: str
    answer: str
    task: str


@dataclass(frozen=True, slots=True)
class Task:
    """A family of items. `make` draws (prompt, answer); `example` is a prompt of the family."""

    name: str
    example: str
    make: Callable[[random.Random], tuple[str, str]]


def word(rng: random.Random, low: int, high: int) -> str:
    """A lower-case word of `low` to `high` letters; half of them can be pronounced."""
    length = rng.randint(low, high)
    if rng.random() < 0.5:
        return "".join(rng.choices(string.ascii_lowercase, k=length))
    first = rng.randrange(2)
    return "".join(rng.choice((CONSONANTS, VOWELS)[(first + i) % 2]) for i in range(length))


def any_case_word(rng: random.Random, low: int, high: int) -> str:
    """As `word`; one in five starts with a capital letter."""
    text = word(rng, low, high)
    return text.capitalize() if rng.random() < 0.2 else text


def number(rng: random.Random, max_digits: int) -> int:
    """A number whose count of digits is uniform, so that short numbers are not rare."""
    return rng.randrange(10 ** rng.randint(1, max_digits))


def add(rng: random.Random) -> tuple[str, str]:
    """Sum of two numbers of at most three digits."""
    a, b = number(rng, 3), number(rng, 3)
    return f"add: {a}+{b}", str(a + b)


def reverse(rng: random.Random) -> tuple[str, str]:
    """A word of 3 to 14 letters, spelt backwards."""
    text = any_case_word(rng, 3, 14)
    return f"reverse: {text}", text[::-1]


def sort(rng: random.Random) -> tuple[str, str]:
    """3 to 12 letters or digits, put in order."""
    if rng.random() < 0.5:
        text = word(rng, 3, 12)
    else:
        text = "".join(rng.choices(string.digits, k=rng.randint(3, 12)))
    return f"sort: {text}", "".join(sorted(text))


def count(rng: random.Random) -> tuple[str, str]:
    """`n` successive numbers from a start below 1000."""
    start, n = number(rng, 3), rng.randint(3, 12)
    return f"count: {start} n={n}", " ".join(str(start + i) for i in range(n))


def repeat(rng: random.Random) -> tuple[str, str]:
    """A word of 2 to 7 letters, said 2 to 8 times."""
    text, n = any_case_word(rng, 2, 7), rng.randint(2, 8)
    return f"repeat: {text} n={n}", " ".join([text] * n)


def to_json(rng: random.Random) -> tuple[str, str]:
    """Name, age and city as a JSON record."""
    name, age, city = any_case_word(rng, 3, 9), rng.randint(1, 99), any_case_word(rng, 3, 10)
    record = json.dumps({"name": name, "age": age, "city": city})
    return f"json: {name} {age} {city}", record


def lookup_of(rng: random.Random, pairs: int) -> tuple[str, str]:
    """The four-digit value of one key among `pairs` pairs; nine characters a pair."""
    keys: dict[str, str] = {}
    while len(keys) < pairs:
        keys["".join(rng.choices(string.ascii_lowercase, k=3))] = f"{rng.randrange(10000):04d}"
    wanted = rng.choice(list(keys))
    table = " ".join(f"{key}={value}" for key, value in keys.items())
    return f"lookup: {table} get {wanted}", keys[wanted]


def lookup(rng: random.Random) -> tuple[str, str]:
    """A look-up among 4 to 60 pairs, that is in 50 to 560 characters."""
    return lookup_of(rng, rng.randint(4, 60))


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task("add", "add: 123+456", add),
        Task("reverse", "reverse: harbour", reverse),
        Task("sort", "sort: dbca", sort),
        Task("count", "count: 37 n=5", count),
        Task("repeat", "repeat: tide n=3", repeat),
        Task("json", "json: tom 31 rome", to_json),
        Task("lookup", "lookup: abc=1234 xyz=0420 get xyz", lookup),
    )
}


def is_held_out(prompt: str) -> bool:
    """Whether a user text belongs to the benchmark and must never be trained on."""
    digest = hashlib.blake2b(prompt.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") % HELD_OUT_SHARE == 0


def sample(task: str, rng: random.Random) -> Item:
    """One item of a task, of either split. Raises KeyError for an unknown task."""
    prompt, answer = TASKS[task].make(rng)
    return Item(prompt, answer, task)


def held_out(n: int, seed: int = HELD_OUT_SEED) -> list[Item]:
    """`n` distinct held-out items, the tasks in turn; the first k are `held_out(k, seed)`."""
    rngs = {name: random.Random(f"{seed}:{name}") for name in TASKS}
    seen: set[str] = set()
    items: list[Item] = []
    for name in itertools.islice(itertools.cycle(TASKS), n):
        while True:
            item = sample(name, rngs[name])
            if is_held_out(item.prompt) and item.prompt not in seen:
                break
        seen.add(item.prompt)
        items.append(item)
    return items


def completion_prompt(item: Item) -> str:
    """The same question for a plain completion; the models answer after one blank."""
    return f"{item.prompt} ="


def is_correct(item: Item, text: str) -> bool:
    """Exact match: the decoded reply, without surrounding blanks, is the answer."""
    return text.strip() == item.answer

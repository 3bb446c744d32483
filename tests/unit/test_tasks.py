"""The tasks have one right answer each, a stable split, and the sizes that were trained."""

import itertools
import json
import random

import pytest

from tidemill.bench import tasks


def drawn(name: str, n: int = 300) -> list[tasks.Item]:
    rng = random.Random(7)
    return [tasks.sample(name, rng) for _ in range(n)]


@pytest.mark.parametrize("name", tasks.TASKS)
def test_items_are_short_printable_and_seeded(name: str) -> None:
    items = drawn(name)
    assert items == drawn(name)
    for item in items:
        assert item.task == name
        assert item.prompt.startswith(f"{name}: ")
        assert item.prompt.isascii()
        assert item.prompt.isprintable()
        assert 1 <= len(item.answer) <= tasks.MAX_ANSWER_CHARS
        assert item.answer == item.answer.strip()


def test_add_and_count() -> None:
    for item in drawn("add"):
        a, b = item.prompt.removeprefix("add: ").split("+")
        assert item.answer == str(int(a) + int(b))
    for item in drawn("count"):
        start, n = item.prompt.removeprefix("count: ").split(" n=")
        numbers = [int(part) for part in item.answer.split(" ")]
        assert numbers == list(range(int(start), int(start) + int(n)))


def test_reverse_sort_and_repeat() -> None:
    for item in drawn("reverse"):
        assert item.answer[::-1] == item.prompt.removeprefix("reverse: ")
    for item in drawn("sort"):
        given = item.prompt.removeprefix("sort: ")
        assert sorted(given) == sorted(item.answer)
        assert all(a <= b for a, b in itertools.pairwise(item.answer))
    for item in drawn("repeat"):
        text, n = item.prompt.removeprefix("repeat: ").split(" n=")
        assert item.answer.split(" ") == [text] * int(n)


def test_json_and_lookup() -> None:
    for item in drawn("json"):
        name, age, city = item.prompt.removeprefix("json: ").split(" ")
        assert json.loads(item.answer) == {"name": name, "age": int(age), "city": city}
    for item in drawn("lookup"):
        table, _, key = item.prompt.removeprefix("lookup: ").rpartition(" get ")
        pairs = table.split(" ")
        assert dict(pair.split("=") for pair in pairs)[key] == item.answer
        assert len(pairs) == len({pair[:3] for pair in pairs})
        assert len(item.prompt) <= 560


def test_held_out_is_balanced_distinct_and_a_prefix_of_a_longer_one() -> None:
    items = tasks.held_out(210)
    assert tasks.held_out(70) == items[:70]
    assert len({item.prompt for item in items}) == len(items)
    assert all(tasks.is_held_out(item.prompt) for item in items)
    assert [item.task for item in items[:7]] == list(tasks.TASKS)
    assert tasks.held_out(7, seed=1) != items[:7]


def test_the_split_is_the_one_the_models_were_trained_with() -> None:
    # A changed hash would put trained items into the benchmark, so the split is pinned by value.
    texts = [f"add: {a}+{b}" for a, b in itertools.product(range(100), repeat=2)]
    assert 500 < sum(map(tasks.is_held_out, texts)) < 750
    assert [text for text in texts if tasks.is_held_out(text)][:3] == [
        "add: 0+15",
        "add: 0+18",
        "add: 0+45",
    ]


def test_scoring_ignores_only_the_blanks_around() -> None:
    item = tasks.Item("add: 1+2", "3", "add")
    assert tasks.completion_prompt(item) == "add: 1+2 ="
    assert tasks.is_correct(item, " 3\n")
    assert not tasks.is_correct(item, "3.")


def test_unknown_task() -> None:
    with pytest.raises(KeyError):
        tasks.sample("divide", random.Random(0))

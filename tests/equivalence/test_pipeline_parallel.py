"""A model in stages answers as a whole one does, token for token in float32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.equivalence.shapes import SHAPES
from tests.equivalence.test_rank_group import answers as answers_of_group
from tests.equivalence.test_tensor_parallel import answers, make_cases


def wrong_answers(
    folder: Path, names: list[str], sizes: list[tuple[int, int]], **flags: Any
) -> list[Any]:
    """Shapes whose requests some (ranks, stages) answer otherwise than a whole model."""
    cases = make_cases(folder, names, **flags)
    (folder / "cases.json").write_text(json.dumps(cases))
    whole, *others = answers((folder, 1, 1), *((folder, *group) for group in sizes))
    assert all(len({tuple(tokens) for tokens in one}) > 1 for one in whole), "nothing is decided"
    return [
        (size, num_stages, name)
        for (size, num_stages), staged in zip(sizes, others, strict=True)
        for name, one, other in zip(names, whole, staged, strict=True)
        if one != other
    ]


@pytest.mark.timeout(900)
def test_every_architecture_answers_as_one_stage(tmp_path: Path) -> None:
    """In stages of one rank, and of two."""
    assert not wrong_answers(tmp_path, list(SHAPES), [(2, 2), (4, 2)])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_three_stages_answer_as_one(tmp_path: Path) -> None:
    deep = [name for name, one in SHAPES.items() if one.config.get("num_hidden_layers", 0) > 2]
    assert len(deep) > 5, "no shape has a layer for every stage"
    assert not wrong_answers(tmp_path, deep, [(3, 3)])


def differing(one: dict[str, Any], other: dict[str, Any]) -> list[Any]:
    """Choices that are not the same; of those that somebody ended it may be how far they came."""
    pairs = [
        pair
        for answers in zip(one["answers"], other["answers"], strict=True)
        for pair in zip(*answers, strict=True)
    ]
    return [
        (first, second)
        for first, second in pairs
        if any(a != b for a, b in zip(first[1], second[1], strict=False))
        or (first[1:] != second[1:] and "abort" not in (first[2], second[2]))
    ]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("model", ["demo", "demo-block"])
def test_steps_in_flight_answer_as_one_by_one(model: str) -> None:
    """Through rank 0's loop, with followers that hear of plans alone."""
    alone = answers_of_group(model, 1)
    staged = answers_of_group(model, 2, 2)
    assert not differing(alone, staged)
    assert staged["preemptions"] > 0
    assert "abort" in {choice[2] for answer in staged["answers"] for choice in answer}
    assert (alone["live"], staged["live"]) == (1, 2)
    if model == "demo":  # the control: a stage that misses pages changes the tokens
        assert differing(alone, answers_of_group(model, 2, 2, module="missed_plan"))


def check_scored(one: dict[str, Any], other: dict[str, Any]) -> None:
    """The same tokens and alternatives, and about the same numbers."""
    assert one["tokens"] == other["tokens"]
    assert one["ids"] == other["ids"]
    assert one["values"] == pytest.approx(other["values"], abs=1e-3)
    for vector, wanted in zip(one["vectors"], other["vectors"], strict=True):
        assert vector == pytest.approx(wanted, abs=1e-5)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("model", ["demo", "demo-block"])
def test_what_the_last_stage_tells_beside_tokens_is_the_same(model: str) -> None:
    """Scores of answers and of prompts in pieces, grammars, penalties, edits, vectors: with several
    steps in flight."""
    alone = answers_of_group(model, 1, module="scored_requests")
    check_scored(answers_of_group(model, 2, 2, module="scored_requests"), alone)
    assert len(alone["ids"]) > 200
    assert len({tuple(vector) for vector in alone["vectors"]}) > 10


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("num_ranks", "num_stages"), [(4, 2), (4, 4)])
def test_more_steps_in_flight_answer_as_one_by_one(num_ranks: int, num_stages: int) -> None:
    staged = answers_of_group("demo", num_ranks, num_stages)
    assert not differing(answers_of_group("demo", 1), staged)
    assert staged["live"] == num_stages

"""What the host counts ahead of a decision is what the device counts in it."""

from __future__ import annotations

import random
from dataclasses import fields, replace

import pytest

from engine_service.decoding import pace
from engine_service.decoding.pace import left_open
from engine_service.decoding.reveal_knobs import RevealKnobs
from engine_service.decoding.rules import RULES
from tests.unit.test_unmask import Row, draw_measures, random_row, reveal_rows

SCHEDULED = {
    name for name, rule in RULES.items() if rule.reads in (("steps",), ("steps", "alg_temp"))
}
SCHEDULED -= {"origin"}
"""origin throws a coin for every position."""
ONE = {"threshold", "prefix"}
"""They take one position at a threshold that no probability reaches."""


def knobs_of(row: Row) -> RevealKnobs:
    names = {one.name for one in fields(RevealKnobs)} & row.knobs.keys()
    return RevealKnobs(**{name: row.knobs[name] for name in names})


def check(rng: random.Random, block: int) -> set[str]:
    """Plays rows of all rules to their ends; the rules whose pace was known."""
    rows, known = [random_row(rng, block, (name,)) for name in RULES for _ in range(4)], set()
    for row in rows[::2]:
        row.knobs["threshold"] = 1.5
    for _ in range(2 * block):
        takes = reveal_rows(rows, [draw_measures(rng, block, exact=False) for _ in rows])
        for row, take in zip(rows, takes, strict=True):
            name, num_open, steps = row.knobs["remasking"], sum(row.is_open), row.knobs["steps"]
            left = left_open(knobs_of(row), num_open, step=row.step, steps=steps)
            is_known = name in SCHEDULED or (name in ONE and row.knobs["threshold"] > 1)
            assert (left is not None) == is_known, row
            if left is not None:
                assert left == num_open - sum(take), row
                known.add(name)
            row.is_open = [
                still and not taken for still, taken in zip(row.is_open, take, strict=True)
            ]
            row.step += 1
    return known


@pytest.mark.parametrize("block", [1, 5, 32])
def test_what_is_left_open_is_known_ahead(block: int, seed: int) -> None:
    assert check(random.Random(seed), block) == SCHEDULED | ONE


def test_control_another_schedule_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "DREAM_EPS", 0.5)
    with pytest.raises(AssertionError):
        check(random.Random(1), 32)


def test_nothing_is_known_of_what_may_be_edited() -> None:
    knobs = RevealKnobs(remasking="low_confidence", steps=4)
    assert left_open(knobs, 8, step=0, steps=4) == 6
    assert left_open(replace(knobs, edit_threshold=0.5), 8, step=0, steps=4) is None

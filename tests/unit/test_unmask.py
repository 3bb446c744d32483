"""Unmask rules, vectorised over rows, against sorted Python lists."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine_service.decoding.unmask import (
    REMASKING,
    above_threshold,
    dynamic,
    leftmost,
    most_confident,
    quota,
    reveal,
)
from tests.equivalence.references import reference_rule

BLOCK = 6
LEVELS = [0.0, 0.25, 0.5, 0.5, 0.75, 1.0]
"""Few levels, so that ties and exact thresholds are common."""

ROW = st.fixed_dictionaries(
    {
        "rule": st.sampled_from(REMASKING),
        "confidence": st.lists(st.sampled_from(LEVELS), min_size=BLOCK, max_size=BLOCK),
        "masked": st.lists(st.booleans(), min_size=BLOCK, max_size=BLOCK),
        "threshold": st.sampled_from([0.0, 0.25, 0.5, 0.9, 1.0, 2.0]),
        "steps": st.integers(1, BLOCK),
        "step": st.integers(0, BLOCK),
        "num_masks": st.integers(1, BLOCK),
    }
)


def reveal_rows(rows: list[dict]) -> list[list[bool]]:
    """All rows at once, each by its own rule."""
    return reveal(
        torch.tensor([REMASKING.index(row["rule"]) for row in rows]),
        torch.tensor([row["confidence"] for row in rows], dtype=torch.float64),
        torch.tensor([row["masked"] for row in rows]),
        torch.tensor([row["threshold"] for row in rows], dtype=torch.float64),
        quota(
            torch.tensor([row["num_masks"] for row in rows]),
            torch.tensor([row["steps"] for row in rows]),
            torch.tensor([row["step"] for row in rows]),
        ),
    ).tolist()


@given(st.lists(ROW, min_size=1, max_size=5))
def test_every_row_follows_its_own_rule(rows: list[dict]) -> None:
    for row, take in zip(rows, reveal_rows(rows), strict=True):
        places = [i for i in range(BLOCK) if row["masked"][i]]
        knobs = {"remasking": row["rule"], "threshold": row["threshold"], "steps": row["steps"]}
        confidence = [row["confidence"][i] for i in places]
        chosen = reference_rule(confidence, row["num_masks"], row["step"], BLOCK, knobs)
        expected = {places[i] for i in chosen} if places else set()
        assert {i for i in range(BLOCK) if take[i]} == expected
        assert bool(expected) == bool(places), "progress of at least one"


@pytest.mark.parametrize(
    ("num_masks", "steps", "expected"),
    [
        (8, 4, [2, 2, 2, 2]),
        (7, 3, [3, 2, 2]),
        (3, 8, [1, 1, 1]),
        (8, 1, [8]),
        (5, 5, [1, 1, 1, 1, 1]),
    ],
)
def test_the_schedule_spreads_the_masks_of_a_block(
    num_masks: int, steps: int, expected: list[int]
) -> None:
    shares = [
        int(quota(torch.tensor([num_masks]), torch.tensor([steps]), torch.tensor([step])))
        for step in range(len(expected))
    ]
    assert shares == expected
    assert sum(shares) >= num_masks


def test_ties_go_to_the_lowest_position() -> None:
    confidence = torch.tensor([[0.5, 0.9, 0.9, 0.9]])
    masked = torch.tensor([[True, False, True, True]])
    one = torch.tensor([1])
    assert most_confident(confidence, masked, one).tolist() == [[False, False, True, False]]
    assert leftmost(masked, one).tolist() == [[True, False, False, False]]


def test_the_threshold_itself_counts_except_for_dynamic() -> None:
    confidence = torch.tensor([[0.9, 0.9, 0.1]], dtype=torch.float64)
    masked = torch.ones(1, 3, dtype=torch.bool)
    threshold, one = torch.tensor([0.9], dtype=torch.float64), torch.tensor([1])
    assert above_threshold(confidence, masked, threshold).tolist() == [[True, True, False]]
    assert dynamic(confidence, masked, threshold, one).tolist() == [[True, False, False]]

"""Percentiles against a count of what does not exceed them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.bench.percentiles import PERCENTS, nearest_rank, percentiles_ms


def test_percentiles_are_values_that_were_seen() -> None:
    hundred = [number / 1000 for number in range(100, 0, -1)]
    assert percentiles_ms(hundred) == {"p50": 50.0, "p90": 90.0, "p99": 99.0}
    assert percentiles_ms([0.25]) == {"p50": 250.0, "p90": 250.0, "p99": 250.0}
    assert percentiles_ms([]) == {}
    assert percentiles_ms([0.001, 0.002], PERCENTS)["p50"] == 1.0, "not between the two"


@pytest.mark.parametrize("size", [1, 2, 7, 99, 100, 101, 1000])
def test_percentiles_are_those_of_numpy(size: int) -> None:
    values = np.random.default_rng(size).lognormal(size=size)
    theirs = np.percentile(values, PERCENTS, method="inverted_cdf")
    assert nearest_rank(values.tolist(), PERCENTS) == theirs.tolist()


@given(st.lists(st.integers(0, 30), min_size=1, max_size=300), st.integers(1, 100))
def test_a_percentile_is_the_least_value_that_so_many_do_not_exceed(
    values: list[int], percent: int
) -> None:
    (found,) = nearest_rank(values, [percent])

    def share(bound: float) -> int:
        return 100 * sum(value <= bound for value in values)

    assert share(found) >= percent * len(values)
    assert found in values
    lower = [value for value in values if value < found]
    assert not lower or share(max(lower)) < percent * len(values)

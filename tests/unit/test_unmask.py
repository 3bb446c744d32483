"""Unmask rules, vectorised over rows, against Python loops over single positions."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from engine_service.decoding import rules, unmask
from engine_service.decoding.rules import RULES, Count, Evidence, Order, Terms, reveal
from engine_service.decoding.unmask import dream_quota, dream_rate, quota, remaining_quota
from tests.equivalence.references import random_knobs, with_defaults
from tests.equivalence.rule_reference import DREAM, READS, START, Shown, slow_adapt, slow_rule

LEVELS = (0.0, 0.125, 0.25, 0.5, 0.5, 0.75, 1.0)
"""Few levels, exact in binary: ties and measures on a bound are common."""


@dataclass
class Row:
    """A block on its way, and what its rule is asked with."""

    knobs: dict[str, Any]
    is_open: list[bool]
    step: int = 0
    adapted: float = START
    num_masks: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_masks = sum(self.is_open)


def random_row(rng: random.Random, block: int, names: tuple[str, ...] = tuple(RULES)) -> Row:
    """A block with gaps, as a prompt and pinned tokens leave them."""
    knobs = with_defaults(random_knobs(rng, block, names), block)
    knobs["threshold"] = rng.choice([*LEVELS, knobs["threshold"]])
    knobs["low_threshold"] = min(knobs["threshold"], rng.choice(LEVELS))
    density = rng.choice([0.4, 0.8, 1.0])
    is_open = [rng.random() < density for _ in range(block)]
    is_open[rng.randrange(block)] = True
    return Row(knobs, is_open)


def draw_measures(rng: random.Random, block: int, exact: bool) -> dict[str, list[float]]:
    """Of every position of a row; `exact`: from few levels."""
    names = ("confidence", "margin", "entropy", "uniform")
    draw = (lambda: rng.choice(LEVELS)) if exact else rng.random
    return {name: [draw() for _ in range(block)] for name in names}


def show(row: Row, measures: dict[str, list[float]]) -> Shown:
    places = [i for i, still in enumerate(row.is_open) if still]
    return Shown(
        positions=places, **{name: [line[i] for i in places] for name, line in measures.items()}
    )


def reveal_rows(rows: list[Row], measures: list[dict[str, list[float]]]) -> list[list[bool]]:
    """All rows at once, each by its own rule."""

    def table(name: str) -> torch.Tensor:
        return torch.tensor([line[name] for line in measures], dtype=torch.float64)

    def whole(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64)

    def real(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64)

    seen = Evidence(
        masked_RB=torch.tensor([row.is_open for row in rows]),
        confidence_RB=table("confidence"),
        margin_RB=table("margin"),
        negative_entropy_RB=-table("entropy"),
        uniform_RB=table("uniform"),
    )
    chosen = [RULES[row.knobs["remasking"]] for row in rows]
    is_adaptive = [rule.count is Count.AT_MOST for rule in chosen]
    knobs = [row.knobs for row in rows]
    terms = Terms(
        order_R=whole([rule.order for rule in chosen]),
        count_R=whole([rule.count for rule in chosen]),
        num_masks_R=whole([row.num_masks for row in rows]),
        steps_R=whole([own["steps"] for own in knobs]),
        step_R=whole([row.step for row in rows]),
        max_parallel_R=whole([own["max_parallel"] for own in knobs]),
        threshold_R=real(
            [
                row.adapted if adapts else row.knobs["threshold"]
                for row, adapts in zip(rows, is_adaptive, strict=True)
            ]
        ),
        low_threshold_R=real([own["low_threshold"] for own in knobs]),
        factor_R=real([own["factor"] for own in knobs]),
        entropy_bound_R=real([own["entropy_bound"] for own in knobs]),
        alg_temp_R=real([own["alg_temp"] for own in knobs]),
    )
    return reveal(seen, terms).tolist()


def play(rng: random.Random, rows: list[Row], *, exact: bool) -> list[tuple[str, int, int]]:
    """Steps all rows until nothing is masked; (rule, masks, steps) of each. A row that is done
    stays in the batch. Raises AssertionError at the first difference from the reference."""
    block = len(rows[0].is_open)
    used = [0] * len(rows)
    if exact:  # logarithms are not, and levels are no random numbers
        rows = [replace(row, knobs={**row.knobs, "alg_temp": 0.0}) for row in rows]
    for _ in range(4 * block):
        measures = [draw_measures(rng, block, exact) for _ in rows]
        takes = reveal_rows(rows, measures)
        for i, (row, take, line) in enumerate(zip(rows, takes, measures, strict=True)):
            if not any(row.is_open):
                assert not any(take)
                continue
            shown = show(row, line)
            places = slow_rule(
                shown, num_masks=row.num_masks, step=row.step, knobs=row.knobs, adapted=row.adapted
            )
            expected = {shown.positions[place] for place in places}
            assert {p for p in range(block) if take[p]} == expected, (row, line)
            assert expected or row.knobs["remasking"] in DREAM, "progress of at least one"
            row.adapted = slow_adapt(row.adapted, len(expected), len(shown.positions))
            row.is_open = [still and p not in expected for p, still in enumerate(row.is_open)]
            row.step += 1
            used[i] += 1
        if not any(any(row.is_open) for row in rows):
            break
    assert not any(any(row.is_open) for row in rows), "a block never ends"
    return [
        (row.knobs["remasking"], row.num_masks, steps)
        for row, steps in zip(rows, used, strict=True)
    ]


def test_the_reference_knows_the_same_rules() -> None:
    assert {name: rule.reads for name, rule in RULES.items()} == READS
    assert {rule.order for rule in RULES.values()} == set(Order)
    assert {rule.count for rule in RULES.values()} == set(Count)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("block", [1, 5, 32])
def test_every_rule_reveals_what_its_definition_says(name: str, block: int, seed: int) -> None:
    rng = random.Random(f"{seed} {name} {block}")
    for exact in (True, False):
        for rule, num_masks, steps in play(
            rng, [random_row(rng, block, (name,)) for _ in range(8)], exact=exact
        ):
            assert steps <= (block if rule in DREAM else num_masks)


def every_kind(_: torch.Tensor, kinds: Any) -> set[int]:
    """`rules.present` as it is on CUDA."""
    return set(kinds)


def test_what_no_row_asks_for_makes_no_difference(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "present", every_kind)
    rng = random.Random(seed)
    play(rng, [random_row(rng, 9) for _ in range(24)], exact=True)
    for name in RULES:
        play(rng, [random_row(rng, 5, (name,)) for _ in range(4)], exact=False)


@pytest.mark.parametrize("exact", [True, False])
def test_every_row_of_a_batch_follows_its_own_rule(exact: bool, seed: int) -> None:
    rng = random.Random(seed)
    for block in (1, 2, 3, 4, 7, 16):
        play(rng, [random_row(rng, block) for _ in range(24)], exact=exact)


@pytest.mark.parametrize(
    ("module", "name", "wrong"),
    [
        (rules, "count_at_least", lambda measure, masked, least: masked.sum(1)),
        (rules, "count_by_factor", lambda ranked, num_open, factor: num_open),
        (rules, "count_by_entropy", lambda ranked, num_open, bound: num_open.clamp(max=1)),
        (rules, "count_leading", lambda confidence, masked, least: masked.sum(1)),
        (rules, "best_of_runs", lambda confidence, masked: masked),
        (rules, "remaining_quota", lambda num_open, steps, step: (num_open + 1) // 2),
        (rules, "dream_quota", lambda num_open, rate: (num_open * rate).ceil().long()),
        (unmask, "DREAM_EPS", 0.5),
    ],
)
def test_control_a_wrong_rule_is_noticed(
    module: Any, name: str, wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, name, wrong)
    rng = random.Random(1)
    rows = [random_row(rng, 9, (rule,)) for rule in RULES for _ in range(12)]
    with pytest.raises(AssertionError):
        play(rng, rows, exact=True)


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
    def share(of: Any, masks: int, step: int) -> int:
        return int(of(torch.tensor([masks]), torch.tensor([steps]), torch.tensor([step])))

    assert [share(quota, num_masks, step) for step in range(len(expected))] == expected
    assert sum(expected) == num_masks
    left = [num_masks - sum(expected[:step]) for step in range(len(expected))]
    assert [share(remaining_quota, m, step) for step, m in enumerate(left)] == expected


@pytest.mark.parametrize(
    ("num_masks", "steps", "expected"),
    [
        # floor(8 * 0.999 / 4) is 1, not 2: eps takes from every step but the last.
        (8, 4, [1, 2, 2, 3]),
        (4, 4, [0, 1, 1, 2]),
        (2, 5, [0, 0, 0, 0, 2]),
        (3, 1, [3]),
    ],
)
def test_dreams_schedule_rounds_down_and_ends_with_all(
    num_masks: int, steps: int, expected: list[int]
) -> None:
    shares, left = [], num_masks
    for step in range(steps):
        rate = dream_rate(torch.tensor([steps]), torch.tensor([step]))
        shares.append(int(dream_quota(torch.tensor([left]), rate)))
        left -= shares[-1]
    assert (shares, left) == (expected, 0)


def one_step(name: str, confidence: list[float], **knobs: Any) -> list[int]:
    """Places that fall of a block in which everything is masked."""
    block = len(confidence)
    whole = with_defaults({"remasking": name, **knobs}, block)
    line = dict.fromkeys(("confidence", "margin", "uniform"), confidence)
    line["entropy"] = [-c for c in confidence]
    (take,) = reveal_rows([Row(whole, [True] * block)], [line])
    return [i for i, falls in enumerate(take) if falls]


@pytest.mark.parametrize("name", ["low_confidence", "random", "topk_margin", "entropy"])
def test_ties_go_to_the_lowest_position(name: str) -> None:
    # Three positions of four steps: Dream's first share is floor(9 * 0.25), LLaDA's is 3.
    tied = [0.5, 0.9, 0.9, 0.5, 0.9, 0.5, 0.5, 0.5, 0.5]
    assert one_step(name, tied, steps=4) == [1, 2, 4][: 2 if name in DREAM else 3]


def test_on_a_bound() -> None:
    assert one_step("threshold", [0.5, 0.25, 0.5], threshold=0.5) == [0, 2]
    assert one_step("low_confidence_dynamic", [0.5, 0.25, 0.5], threshold=0.5) == [0]
    assert one_step("prefix", [0.5, 0.25, 0.5], threshold=0.5) == [0]
    assert one_step("factor", [0.5, 0.75, 0.5], factor=1.0) == [1]
    assert one_step("factor", [0.5, 0.75, 0.6875], factor=0.9375) == [1, 2]
    hierarchical = {"threshold": 0.5, "low_threshold": 0.25}
    assert one_step("hierarchical", [0.5, 0.25, 0.5], **hierarchical) == [0]
    assert one_step("hierarchical", [0.25, 0.125, 0.25], **hierarchical) == [0]

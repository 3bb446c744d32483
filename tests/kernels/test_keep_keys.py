"""The keys that are kept are those that a loop over positions keeps, in order of position, over
sizes, groupings of heads and scores that tie.
"""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest
import torch

from engine_service.kernels.keep_keys import keep_keys_ref, keep_keys_triton
from engine_service.kernels.key_scores import Bounds, Cache, KeepingSpans
from tests.equivalence.oracles_sparse import keep

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WAYS = {"torch": keep_keys_ref, "triton": keep_keys_triton}
ways = pytest.mark.parametrize("way", WAYS)
UNTOUCHED = 77.0


class Keeping(NamedTuple):
    """What one span keeps."""

    length: int
    hole: tuple[int, int]
    count: int
    by_head: bool
    reach: int

    @property
    def num_outside(self) -> int:
        return self.length - (self.hole[1] - self.hole[0])


class Case:
    """Canvases side by side, each in pages of its own; rows of the target in shuffled pages."""

    def __init__(
        self,
        spans: list[Keeping],
        heads: tuple[int, int],
        *,
        size: int,
        page: int,
        few_values: bool,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.spans, self.page = spans, page
        self.groups, self.size = heads[1], size

        def draw(count: int, width: int) -> torch.Tensor:
            if few_values:
                return torch.randint(-1, 2, (count, width, size)).to(DEVICE, dtype)
            return torch.randn(count, width, size).to(DEVICE, dtype)

        self.q = [draw(one.length, heads[0]) for one in spans]
        self.k = [draw(one.length, self.groups) for one in spans]
        # Values tell positions.
        self.v = [draw(one.length, self.groups) for one in spans]
        for values in self.v:
            values[:, :, 0] = torch.arange(len(values), device=DEVICE)[:, None] % 256
        self.pages_of = [-(-one.length // page) for one in spans]
        self.bases = [page * sum(self.pages_of[:index]) for index in range(len(spans))]
        self.own = self.empty(sum(self.pages_of), torch.nan, dtype)
        for base, keys, values in zip(self.bases, self.k, self.v, strict=True):
            slots = base + torch.arange(len(keys), device=DEVICE)
            self.own.k[slots // page, slots % page] = keys
            self.own.v[slots // page, slots % page] = values
        self.rows = [-(-(one.count + 3) // page) if one.count else 0 for one in spans]
        shuffled = random.Random(len(spans)).sample(range(sum(self.rows)), sum(self.rows))
        self.tables = [
            shuffled[sum(self.rows[:index]) :][:count] for index, count in enumerate(self.rows)
        ]
        self.target = self.empty(sum(self.rows) + 1, UNTOUCHED, dtype)

    def empty(self, num_pages: int, fill: float, dtype: torch.dtype) -> Cache:
        """Head-major, as the Triton backend keeps its pages."""
        shape = (num_pages, self.groups, self.page, self.size)
        k, v = (torch.full(shape, fill, dtype=dtype, device=DEVICE) for _ in "kv")
        return Cache(k.transpose(1, 2), v.transpose(1, 2))

    def arguments(self) -> tuple[KeepingSpans, Bounds]:
        def column(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int64, device=DEVICE)

        spans, trash = self.spans, len(self.target.k) - 1
        firsts = [sum(one.length for one in spans[:index]) for index in range(len(spans))]
        width = max(self.rows) + 1
        pages = [table + [trash] * (width - len(table)) for table in self.tables]
        columns = KeepingSpans(
            first_token=column(firsts),
            first_slot=column(self.bases),
            length=column([one.length for one in spans]),
            hole_start=column([one.hole[0] for one in spans]),
            hole_stop=column([one.hole[1] for one in spans]),
            num_kept=column([one.count for one in spans]),
            num_slots=column([count * self.page for count in self.rows]),
            by_head=column([one.by_head for one in spans]),
            reach=column([one.reach for one in spans]),
            pages=torch.tensor(pages, dtype=torch.int32, device=DEVICE),
        )
        hole = max(one.hole[1] - one.hole[0] for one in spans)
        bounds = Bounds(max(one.length for one in spans), hole, max(one.reach for one in spans))
        return columns, bounds

    def run(self, way: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """[slots, K, D] keys and values of every row."""
        q = torch.cat(self.q)
        # As they come: a part of wider rows.
        wide = torch.cat((q, torch.full_like(q, torch.nan)), dim=1)[:, : q.shape[1]]
        WAYS[way](wide, self.own, self.target, *self.arguments())
        return [
            (self.target.k[table].flatten(0, 1), self.target.v[table].flatten(0, 1))
            for table in self.tables
        ]

    def wanted(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Of one row, by the slow loop; [count, K, D] in order of position."""
        one, k, v = self.spans[index], self.k[index].float(), self.v[index].float()
        hole = range(*one.hole)
        ratio, pool = (one.count + 0.01) / one.num_outside, 2 * one.reach + 1
        q = self.q[index][list(hole)].float()
        places = torch.arange(len(k), device=DEVICE)[:, None, None].expand_as(k).float()
        _, chosen = keep(q, k, places, hole, ratio=ratio, by_head=one.by_head, pool=pool)
        chosen = chosen.sort(dim=0).values.long()
        return k.gather(0, chosen), v.gather(0, chosen)


def random_spans(draw: random.Random, longest: int) -> list[Keeping]:
    """Holes of a power of two of queries: their means are exact, so that ties are."""
    spans = []
    for _ in range(draw.randint(1, 4)):
        width = draw.choice([1, 2, 4, 16])
        length = draw.randint(width + 1, longest)
        start = draw.choice([0, length - width, draw.randint(0, length - width)])
        outside = length - width
        count = draw.choice([1, outside, draw.randint(1, outside)])
        reach = draw.choice([0, 1, 3, 12])
        spans.append(Keeping(length, (start, start + width), count, draw.random() < 0.5, reach))
    return spans


@ways
@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (3, 1)], ids=str)
@pytest.mark.parametrize(("size", "page"), [(4, 4), (16, 16)])
def test_ties_go_to_the_first_position(
    way: str, heads: tuple[int, int], size: int, page: int, seed: int
) -> None:
    """Keys out of few values, so that many scores tie, at zero of either sign too. Roots of
    sizes are whole: the loop divides by them."""
    torch.manual_seed(seed)
    draw = random.Random(seed)
    for _ in range(3):
        case = Case(random_spans(draw, 90), heads, size=size, page=page, few_values=True)
        rows = case.run(way)
        for index, (one, (keys, values)) in enumerate(zip(case.spans, rows, strict=True)):
            wanted = case.wanted(index)
            assert torch.equal(keys[: one.count], wanted[0])
            assert torch.equal(values[: one.count], wanted[1])
            assert not keys[one.count :].any(), "slots behind them are cleared"
            assert not values[one.count :].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_kernels_keep_what_plain_torch_keeps(dtype: torch.dtype, seed: int) -> None:
    torch.manual_seed(seed)
    draw = random.Random(seed)
    for _ in range(4):
        spans = [*random_spans(draw, 200), Keeping(30, (4, 8), 0, False, 0)]
        case = Case(spans, (4, 2), size=24, page=8, few_values=False, dtype=dtype)
        for (k, v), (want_k, want_v) in zip(case.run("triton"), case.run("torch"), strict=True):
            assert torch.equal(k, want_k)
            assert torch.equal(v, want_v)


def test_more_candidates_than_are_looked_at_together(seed: int) -> None:
    torch.manual_seed(seed)
    spans = [Keeping(2500, (1020, 1036), 1100, True, 1), Keeping(1100, (0, 8), 7, False, 2)]
    case = Case(spans, (2, 2), size=4, page=64, few_values=False)
    for (k, v), (want_k, want_v) in zip(case.run("triton"), case.run("torch"), strict=True):
        assert torch.equal(k, want_k)
        assert torch.equal(v, want_v)


def test_a_span_that_keeps_nothing_touches_nothing() -> None:
    spans = [Keeping(30, (4, 8), 0, False, 1), Keeping(9, (0, 4), 2, True, 0)]
    case = Case(spans, (2, 1), size=4, page=4, few_values=False)
    case.target.k[case.tables[1]] = 0
    before = case.target.k.clone()
    case.run("triton")
    free = [page for page in range(len(before)) if page not in case.tables[1]]
    assert torch.equal(case.target.k[free], before[free])
    assert (before[free] == UNTOUCHED).all()
    assert case.target.k[case.tables[1]].any(), "the control: the other one writes"


@ways
@pytest.mark.parametrize("change", ["hole", "count", "by_head", "reach"])
def test_control_every_wish_is_read(way: str, change: str, seed: int) -> None:
    wish = Keeping(120, (40, 48), 30, True, 0)
    other = {"hole": (8, 16), "count": 29, "by_head": False, "reach": 2}[change]
    rows = []
    for one in (wish, wish._replace(**{change: other})):
        torch.manual_seed(seed)
        case = Case([one], (4, 4), size=8, page=8, few_values=False)
        rows.append(case.run(way)[0][1])
    assert not torch.equal(*rows)

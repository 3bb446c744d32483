"""Filtered draws: the kernel against sorting, on random rows and on rows full of equals."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from engine_service.kernels import filters as kernel
from engine_service.kernels import sampling
from engine_service.kernels.candidates import Filters
from engine_service.kernels.filters import draw_filtered_triton
from engine_service.kernels.sampling import draw_tokens_triton
from engine_service.kernels.streams import Streams
from engine_service.sampling.batch import DecideBatch
from engine_service.sampling.filters import keep_likely
from engine_service.sampling.rng import Purpose
from engine_service.sampling.sampler import choose
from tests.sampling_batches import Row, make_batch, on_device

device = "cuda" if torch.cuda.is_available() else "cpu"
COUNT = 400 if device == "cuda" else 6
"""Rows of a batch: a program of the interpreter takes a tenth of a second."""


def draw(batch: DecideBatch, draws: torch.Tensor, *, filtered: bool = True) -> list[int]:
    there = on_device(batch, device)
    tables = there.tables
    streams = Streams(
        there.rows, there.positions, draws.to(device), tables.temperature, tables.seeds,
        Purpose.TOKEN,
    )  # fmt: skip
    banned = tables.banned_ids
    if not filtered:
        return draw_tokens_triton(there.logits_NV, streams, banned).tolist()
    filters = Filters(tables.top_k, tables.top_p, tables.min_p)
    return draw_filtered_triton(there.logits_NV, streams, filters, banned).tolist()


def filtered_row(rng: random.Random, vocab: int) -> Row:
    """Probabilities that no sum of equals reaches exactly: there the last bit would decide."""
    return Row(
        temperature=rng.choice([0.0, 0.6, 1.0, 1.9]),
        top_p=rng.choice([1.0, 0.93, 0.52, 0.113]),
        top_k=rng.choice([0, 1, 2, 20, 64, 65, vocab, vocab + 5]),
        min_p=rng.choice([0.0, 0.0, 0.06, 0.51]),
        seed=rng.getrandbits(64),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("vocab", "scale"), [(3, 1.0), (60, 2.0), (1000, 0.5), (9000, 3.0)])
def test_tokens_are_those_of_sorting(
    vocab: int, scale: float, dtype: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    rng = random.Random(seed)
    rows = [filtered_row(rng, vocab) for _ in range(COUNT)]
    logits = (torch.randn(COUNT, vocab) * scale).to(dtype)
    batch = make_batch(logits, rows, banned=(1,))
    draws = torch.arange(COUNT)
    assert draw(batch, draws) == choose(batch, draws).tolist()


@pytest.mark.parametrize("vocab", [700, 4900])
@pytest.mark.parametrize("levels", [1, 2, 3])
def test_equals_are_kept_from_the_lowest_id_on(levels: int, vocab: int, seed: int) -> None:
    """In the longer line more groups than candidates are taken from have the best score."""
    rng = random.Random(seed)
    values = [0.0, -0.0, 1.5, -2.25][: levels + 1]
    logits = torch.tensor([[rng.choice(values) for _ in range(vocab)] for _ in range(COUNT)])
    rows = [filtered_row(rng, vocab) for _ in range(COUNT)]
    rows[0] = Row(temperature=1.0, top_k=7, top_p=0.52, seed=seed)
    rows[1:4] = [Row(temperature=1.0, top_k=2, seed=seed + place) for place in range(3)]
    batch = make_batch(logits, rows)
    draws = torch.arange(COUNT)
    assert draw(batch, draws) == choose(batch, draws).tolist()


@pytest.mark.parametrize("scale", [0.1, 3.0])
def test_candidates_are_drawn_from_as_the_whole_row_is(
    scale: float, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(seed)
    rng = random.Random(seed)
    logits = torch.randn(COUNT, 9000) * scale
    logits[0, 40:] = float("-inf")  # fewer are allowed than asked for
    rows = [dataclasses.replace(filtered_row(rng, 9000), top_k=rng.randint(1, 64)) for _ in logits]
    rows[0] = Row(temperature=1.0, top_k=60, top_p=0.93, seed=seed)
    banned, draws = (int(logits[1].argmax()),), torch.arange(COUNT)
    batch = make_batch(logits, rows, banned=banned)
    by_candidates = draw(batch, draws)
    beside_others = make_batch(
        logits, [rows[0], *[dataclasses.replace(row, top_k=0) for row in rows[1:]]], banned=banned
    )
    assert draw(beside_others, draws)[0] == by_candidates[0]
    for module in (kernel, sampling):
        monkeypatch.setattr(module, "FEW", 0)
    assert draw(batch, draws) == by_candidates


@pytest.mark.parametrize(
    "row",
    [
        Row(temperature=1.0, top_k=5),
        Row(temperature=0.7, top_p=0.43),
        Row(temperature=1.2, min_p=0.31),
        Row(temperature=1.0, top_k=9, top_p=0.77),
    ],
    ids=["top_k", "top_p", "min_p", "top_k+top_p"],
)
def test_only_kept_ids_are_drawn(row: Row, seed: int) -> None:
    torch.manual_seed(seed)
    logits = torch.randn(40).expand(COUNT, -1)
    rows = [dataclasses.replace(row, seed=seed + number) for number in range(COUNT)]
    batch = make_batch(logits, rows)
    values, ids = keep_likely(logits[:1] / row.temperature, make_batch(logits[:1], [row]))
    kept = set(ids[values > float("-inf")].tolist())
    draws = torch.zeros(COUNT).long()
    drawn = draw(batch, draws)
    assert set(drawn) <= kept
    freely = draw(batch, draws, filtered=False)
    assert all(now == free for now, free in zip(drawn, freely, strict=True) if free in kept)
    if COUNT > 100:
        assert len(set(drawn)) >= len(kept) - 2
        assert not set(freely) <= kept


@pytest.mark.filterwarnings("ignore:invalid value", "ignore:All-NaN")
def test_rows_of_nothing_allowed_end() -> None:
    logits = torch.full((3, 100), float("-inf"))
    logits[1] = float("nan")
    logits[2, 60] = 3.0
    row = Row(temperature=1.0, top_k=3, top_p=0.5, min_p=0.1)
    tokens = draw(make_batch(logits, [row] * 3), torch.zeros(3).long())
    assert tokens[0] == 0
    assert 0 <= tokens[1] < 100
    assert tokens[2] == 60


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize(
    "row",
    [
        Row(temperature=1.0, top_p=0.9),
        Row(temperature=1.0, top_k=70, top_p=0.9),
        Row(temperature=1.0, top_k=20, top_p=0.9),
        Row(temperature=1.0, min_p=0.1),
    ],
    ids=["top_p", "large top_k", "top_k", "min_p"],
)
def test_a_missing_number_is_an_id_that_is_not_allowed(row: Row, seed: int) -> None:
    torch.manual_seed(seed)
    logits = torch.randn(COUNT, 1000)
    rows = [dataclasses.replace(row, seed=seed + number) for number in range(COUNT)]
    draws = torch.arange(COUNT)
    logits[:, 77] = float("-inf")
    want = draw(make_batch(logits, rows), draws)
    logits[:, 77] = float("nan")
    assert draw(make_batch(logits, rows), draws) == want

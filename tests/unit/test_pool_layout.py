"""What a step adds to the sums of its rows, against a loop over positions; on random chunks."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from engine_service.core.params import MethodParams, PoolingParams
from engine_service.core.pool_admission import NOTHING_SAMPLED
from engine_service.core.step import EMPTY_CANVAS, Decision, NewRow, PageAppend, Span
from engine_service.staging import stage
from engine_service.worker.batch import bind_batch, columns_of
from engine_service.worker.layout import lay_out
from engine_service.worker.pool_rows import PoolRows
from engine_service.worker.pooling import pool, split_pooled
from engine_service.worker.tables import RowTables

ROWS, WIDTH, PAGE, SIZE = 5, 32, 8, 6
CPU = torch.device("cpu")


def make_tables() -> RowTables:
    """Row 4 generates; the others may be pooled."""
    tables = RowTables(
        max_rows=ROWS,
        table_width=WIDTH,
        page_size=PAGE,
        trash_page=ROWS * WIDTH // PAGE,
        mask_token_id=None,
        methods=("autoregressive", "pooling"),
        device=CPU,
        pooled=PoolRows(ROWS, SIZE, CPU),
    )
    pages = WIDTH // PAGE
    appends = [
        PageAppend(row, 0, tuple(range(row * pages, (row + 1) * pages))) for row in range(ROWS)
    ]
    tables.apply((), appends)
    return tables


def take(tables: RowTables, row: int, length: int, params: PoolingParams | None) -> None:
    method = "autoregressive" if params is None else "pooling"
    asked = params or MethodParams()
    new = NewRow(row, [1] * length, length, EMPTY_CANVAS, method, asked, NOTHING_SAMPLED)
    pages = tuple(range(row * WIDTH // PAGE, (row + 1) * WIDTH // PAGE))
    tables.apply([new], [PageAppend(row, 0, pages)])


def run_step(tables: RowTables, spans: list[Span], states: dict[int, torch.Tensor], chunk: int):
    """Decisions of a step whose forward gives a row's position its line of `states`."""
    layout = lay_out(spans, tables, logits_shift=1, logit_chunk=chunk, longest_first=True)
    batch = bind_batch(layout, stage(columns_of(layout), CPU), tables)
    rows = layout.rows.repeat(np.diff(layout.cu_seqlens))
    lines = [
        states[row][position]
        for row, position in zip(rows.tolist(), layout.positions.tolist(), strict=True)
    ]
    decisions: list[Decision | None] = [None] * len(spans)
    assert all(part.rows.tolist() == [4] for part in batch.decides)
    if batch.pools is not None:
        sums = tables.pooled.sums
        made = pool(batch.pools, torch.stack(lines), sums, lambda x: 2 * x, lambda x: x[:, :2])
        split_pooled(batch.pools.layout, made, decisions)
    return decisions


def reference(states: torch.Tensor, params: PoolingParams) -> np.ndarray:
    doubled = 2 * states
    pooled = {"mean": doubled.mean(0), "last": doubled[-1], "cls": doubled[0]}[params.kind]
    if params.classifies:
        return pooled[:2].numpy()
    pooled = pooled[: params.dimensions]
    return (pooled / pooled.norm() if params.normalize else pooled).numpy()


def draw_params(rng: random.Random) -> PoolingParams:
    if rng.random() < 0.25:
        return PoolingParams(kind="cls", classifies=True)
    return PoolingParams(
        kind=rng.choice(("mean", "last", "cls")),
        normalize=rng.random() < 0.5,
        dimensions=rng.randint(1, SIZE),
    )


@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_prompts_in_any_pieces(chunk: int, seed: int) -> None:
    rng, tables = random.Random(seed), make_tables()
    torch.manual_seed(seed)
    take(tables, 4, 1, None)
    for _ in range(4):
        params = {row: draw_params(rng) for row in rng.sample(range(4), rng.randint(1, 4))}
        states = {row: torch.randn(WIDTH, SIZE) for row in range(ROWS)}
        length = {row: rng.randint(1, WIDTH) for row in params}
        for row, asked in params.items():
            # What an earlier prompt left there must not matter, infinities included.
            tables.pooled.sums[row] = rng.choice((float("inf"), float("nan"), 3.0))
            take(tables, row, length[row], asked)
        done, got = dict.fromkeys(params, 0), dict[int, np.ndarray]()
        while len(got) < len(params):
            spans = [Span(4, 0, 1, 1, 1, 1, 2)]
            for row in rng.sample(sorted(params.keys() - got.keys()), 1):
                end = length[row]
                stop = min(end, done[row] + rng.choice((1, 2, 5, WIDTH)))
                decided = (end, end + 1) if stop == end else (stop, stop)
                spans.insert(rng.randint(0, 1), Span(row, done[row], stop, stop, 1, *decided))
            for span, decision in zip(spans, run_step(tables, spans, states, chunk), strict=True):
                if span.row == 4:
                    assert decision is None
                    continue
                done[span.row] = span.stop
                assert (decision is not None) == (span.stop == length[span.row])
                if decision is not None:
                    got[span.row] = np.frombuffer(decision.vector, dtype="<f4")
        for row, vector in got.items():
            wanted = reference(states[row][: length[row]], params[row])
            np.testing.assert_allclose(vector, wanted, atol=1e-5)


def test_a_row_that_others_take_is_pooled_no_longer() -> None:
    tables = make_tables()
    take(tables, 4, 3, PoolingParams(kind="mean", dimensions=SIZE))
    span, states = Span(4, 0, 3, 3, 1, 3, 4), {4: torch.ones(WIDTH, SIZE)}
    layout = lay_out([span], tables, logits_shift=1, logit_chunk=8)
    assert layout.pools is not None
    assert not layout.decides
    take(tables, 4, 3, None)
    assert run_step(tables, [span], states, 8) == [None]
    assert lay_out([span], tables, logits_shift=1, logit_chunk=8).decides

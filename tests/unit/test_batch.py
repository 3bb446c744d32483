"""Which hidden states a step reads, as its batch says it to the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine_service.core.step import FULL, PageAppend, Span
from engine_service.core.strategy import KeyChoice
from engine_service.staging import stage
from engine_service.worker.batch import ForwardBatch, bind_batch, columns_of
from engine_service.worker.buckets import Bucket
from engine_service.worker.layout import StepLayout, lay_out
from engine_service.worker.padding import pad
from engine_service.worker.pool_rows import PoolKind, PoolRows
from engine_service.worker.tables import RowTables
from tests.row_builders import causal_span, make_row

CPU = torch.device("cpu")
MAX_ROWS, WIDTH = 4, 64


def make_tables(**of_rows: Any) -> RowTables:
    tables = RowTables(
        max_rows=MAX_ROWS,
        table_width=WIDTH,
        page_size=4,
        trash_page=99,
        mask_token_id=7,
        methods=["autoregressive"],
        device=CPU,
    )
    rows = [make_row(row, list(range(32)), **of_rows) for row in range(MAX_ROWS)]
    pages = [PageAppend(row, 0, tuple(range(row * 16, row * 16 + 16))) for row in range(MAX_ROWS)]
    tables.apply(rows, pages)
    return tables


def laid_out(spans: list[Span], tables: RowTables, *, shift: int = 1) -> StepLayout:
    nothing = KeyChoice(0, 0, by_head=False, pool=1)
    return lay_out(spans, tables, logits_shift=shift, logit_chunk=2, choice_of=lambda _: nothing)


def bound(layout: StepLayout, tables: RowTables) -> ForwardBatch:
    return bind_batch(layout, stage(columns_of(layout), CPU), tables)


def reads_of(*spans: Span, shift: int = 1, **of_rows: Any) -> list[int] | None:
    tables = make_tables(**of_rows)
    reads = bound(laid_out(list(spans), tables, shift=shift), tables).reads
    return None if reads is None else sorted(reads.tolist())


def test_the_last_query_of_a_prompt_is_read():
    assert reads_of(causal_span(0, 0, 5, decides=True), causal_span(1, 0, 7, decides=True)) == [
        4,
        11,
    ]


def test_all_parts_of_a_decision_are_read():
    """Three rows of logits, of which two exist at once."""
    spans = [causal_span(row, 0, 5, decides=True) for row in range(3)]
    assert reads_of(*spans) == [4, 9, 14]


def test_a_chunk_of_a_prompt_reads_nothing():
    assert reads_of(causal_span(0, 0, 5, decides=False)) == []


def test_what_is_scored_is_read():
    span = causal_span(0, 0, 12, decides=True)._replace(score_start=8, score_stop=11)
    assert reads_of(span, prompt_logprobs=0) == [7, 8, 9, 11]


def test_both_copies_of_a_guided_canvas_are_read():
    span = Span(0, 0, 20, 0, FULL, 16, 20, aside=2)
    assert reads_of(span, shift=0) == [16, 17, 18, 19, 36, 37, 38, 39]


@pytest.mark.parametrize(("decided", "is_whole"), [(4, False), (5, True)])
def test_more_than_half_is_everything(decided: int, is_whole: bool):
    reads = reads_of(Span(0, 0, 8, 8, 8, 8 - decided, 8), shift=0)
    assert reads == (None if is_whole else [4, 5, 6, 7])


def test_rows_of_one_token_are_read_whole():
    assert reads_of(*(causal_span(row, 4, 5, decides=True) for row in range(3))) is None


def test_a_step_that_pools_reads_everything():
    tables = make_tables()
    tables.pooled = PoolRows(MAX_ROWS, 8, CPU)
    tables.pooled.kind[1] = PoolKind.LAST
    spans = [causal_span(0, 0, 5, decides=True), causal_span(1, 0, 7, decides=True)]
    assert bound(laid_out(spans, tables), tables).reads is None


@pytest.mark.parametrize("num_tokens", [12, 16])
def test_padding_reads_what_nobody_else_reads(num_tokens: int):
    """What is computed twice may be written in either order."""
    tables = make_tables()
    own = [0, num_tokens - 1]
    spans = [causal_span(0, 4, 5, decides=True), causal_span(1, 0, num_tokens - 1, decides=True)]
    layout = pad(laid_out(spans, tables), Bucket(4, 16, 16, 6), tables)
    reads = bound(layout, tables).reads
    assert reads is not None
    assert reads[:2].tolist() == own
    assert len(reads) == 6
    assert not set(reads[2:].tolist()) & set(own)

"""Padding to buckets: the real part of a step stays, and every step finds its bucket."""

import random
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from engine_service.core.step import FULL, PageAppend, Span
from engine_service.core.strategy import KeyChoice
from engine_service.launching import LAUNCH_BOUND, launch_bound
from engine_service.worker.aside import AsideLayout, lay_out_aside
from engine_service.worker.buckets import (
    FILTERED,
    PLAIN,
    Bucket,
    captured_choice,
    captured_choices,
    find_bucket,
    find_forward_bucket,
    list_buckets,
    list_prompts,
    list_whole_canvases,
    row_sizes,
)
from engine_service.worker.layout import StepLayout, lay_out, numbered
from engine_service.worker.padding import pad
from engine_service.worker.tables import RowTables
from tests.row_builders import make_row

MAX_ROWS, WIDTH, PAGE = 6, 32, 4


def make_tables(num_rows: int = MAX_ROWS) -> RowTables:
    tables = RowTables(
        max_rows=num_rows,
        table_width=WIDTH,
        page_size=PAGE,
        trash_page=99,
        mask_token_id=None,
        methods=["autoregressive"],
        device=torch.device("cpu"),
    )
    per_row = WIDTH // PAGE
    rows = [make_row(row, list(range(WIDTH))) for row in range(num_rows)]
    pages = [
        PageAppend(row, 0, tuple(range(row * per_row, (row + 1) * per_row)))
        for row in range(num_rows)
    ]
    tables.apply(rows, pages)
    return tables


def laid_out(spans: list[Span], tables: RowTables) -> StepLayout:
    return lay_out(spans, tables, logits_shift=1, logit_chunk=1000)


def decoding(row: int, position: int) -> Span:
    return Span(row, position, position + 1, position + 1, 1, position + 1, position + 2)


def random_layout(draw: random.Random, tables: RowTables) -> StepLayout:
    spans = []
    for row in draw.sample(range(MAX_ROWS), draw.randint(1, MAX_ROWS)):
        start = draw.randrange(20)
        stop = start + draw.choice([1, 1, 2, 7])
        decides = draw.random() < 0.8 or not spans
        spans.append(Span(row, start, stop, stop, 1, stop, stop + decides))
    return laid_out(spans, tables)


def is_padded(whole: np.ndarray, real: np.ndarray, fill: int) -> bool:
    return bool((whole[: len(real)] == real).all() and (whole[len(real) :] == fill).all())


def test_padding_keeps_the_step_and_fills_up_with_trash(seed):
    draw = random.Random(seed)
    tables = make_tables()
    for _ in range(30):
        layout = random_layout(draw, tables)
        tokens = len(layout.places) + draw.randint(0, 5)
        bucket = Bucket(MAX_ROWS + 1, tokens, tokens + 1, MAX_ROWS + 3)
        padded = pad(layout, bucket, tables)
        assert is_padded(padded.places, layout.places, MAX_ROWS * WIDTH)
        assert is_padded(padded.slots, layout.slots, 99 * PAGE)
        assert is_padded(padded.positions, layout.positions, 0)
        assert is_padded(padded.rows, layout.rows, MAX_ROWS)
        assert is_padded(padded.cu_seqlens, layout.cu_seqlens, len(layout.places))
        assert is_padded(padded.kv_lens, layout.kv_lens, 1)
        assert len(padded.places) == tokens
        assert len(padded.cu_seqlens) == bucket.rows + 1
        part, real = padded.decides[0], layout.decides[0]
        assert is_padded(part.rows, real.rows, MAX_ROWS)
        filler = set(range(tokens)) - set(real.queries.tolist()) or {0}
        assert is_padded(part.queries, real.queries, min(filler))
        assert len(part.rows) == bucket.decided
        # Every decided position has one owner, and padding never belongs to a real span.
        owners = np.searchsorted(part.cu_decide[1:], np.arange(bucket.decided), side="right")
        assert (part.span_rows[owners] == part.rows).all()
        assert part.max_position == real.max_position


def test_rows_of_one_query_stay_rows_of_one_query():
    tables = make_tables()
    layout = laid_out([decoding(2, 5), decoding(4, 9)], tables)
    padded = pad(layout, Bucket(4, 4, 1, 4), tables)
    assert padded.cu_seqlens.tolist() == [0, 1, 2, 3, 4]
    assert padded.uniform_query_len == padded.max_query_len == 1
    assert padded.all_causal


def test_sizes_never_waste_much():
    for most in (1, 3, 64, 256, 1000):
        sizes = row_sizes(most)
        assert sizes[-1] == most
        for rows in range(9, most + 1):
            size = next(size for size in sizes if size >= rows)
            assert size <= max(rows + 7, 1.25 * rows)


@pytest.mark.parametrize("block", [1, 4, 32])
def test_every_small_step_of_one_method_has_a_bucket(block, seed):
    draw = random.Random(seed)
    tables = make_tables()
    buckets = list_buckets(
        max_rows=MAX_ROWS, block=block, max_decide=block, token_budget=1024, logit_limit=1000
    )
    assert [one.tokens for one in buckets] == sorted(one.tokens for one in buckets)
    for _ in range(50):
        count = draw.randint(1, MAX_ROWS)
        spans = []
        for row in range(count):
            blocks = draw.choice([1, 2]) if block > 1 and 2 * block <= WIDTH else 1
            stop = blocks * block
            decided = (stop - block, stop) if block > 1 else (stop, stop + 1)
            spans.append(Span(row, 0, stop, stop, block, *decided))
        layout = lay_out(spans, tables, logits_shift=int(block == 1), logit_chunk=1000)
        bucket = find_bucket(layout, buckets)
        assert bucket is not None
        assert bucket.rows >= count
        pad(layout, bucket, tables)


@pytest.mark.parametrize("max_rows", [1, 32])
def test_few_graphs_serve_whole_canvases_and_waste_little(max_rows):
    buckets = list_whole_canvases(max_rows=max_rows, longest=4096, token_budget=8192)
    assert len(buckets) <= 26, "each is captured at start-up"
    assert all(one.decided == 0 for one in buckets)
    aside, paged = ([one for one in buckets if one.aside == kind] for kind in (True, False))
    for tokens in range(1, 1025):
        for kind, least in ((aside, 63), (paged, 127)):
            bucket = next(one for one in kind if one.tokens >= tokens)
            assert bucket.tokens <= tokens + max(least, tokens // 4)
            assert bucket.longest == bucket.tokens, "one canvas may take it all"
    assert all(one.rows <= 2 * max_rows for one in aside), "the second copies of guidance too"
    assert all(one.rows <= max_rows for one in paged)
    short = list_whole_canvases(max_rows=max_rows, longest=100, token_budget=200)
    assert {one.tokens for one in short} == {64, 128, 192}
    assert max(one.longest for one in short) == 100


def test_canvases_aside_and_over_the_pages_have_buckets_of_their_own():
    tables = make_tables()
    buckets = list_whole_canvases(max_rows=MAX_ROWS, longest=WIDTH, token_budget=256)

    def of(*spans: Span) -> Bucket | None:
        nothing = KeyChoice(0, 0, by_head=False, pool=1)
        layout = lay_out(
            spans, tables, logits_shift=0, logit_chunk=1000, choice_of=lambda _: nothing
        )
        return find_forward_bucket(layout, buckets, LAUNCH_BOUND)

    aside = Span(0, 0, 30, 0, FULL, 3, 7, aside=1)
    paged = Span(1, 0, 30, 30, FULL, 3, 7)
    found = of(aside)
    assert found is not None
    assert (found.aside, found.tokens) == (True, 64)
    both = of(aside._replace(aside=2), aside._replace(row=2))
    assert both is not None, "the copy of guidance counts"
    assert (both.tokens, both.rows) == (128, 4)
    over = of(paged)
    assert over is not None
    assert (over.aside, over.tokens) == (False, 128)
    assert of(aside, paged) is None, "a step of both sorts is launched"
    assert of(*(aside._replace(row=row, aside=2) for row in range(MAX_ROWS))) is None, "too long"


def test_long_canvases_are_replayed_where_little_is_padded():
    tables = make_tables()
    buckets = list_whole_canvases(max_rows=100, longest=WIDTH, token_budget=4096)
    one = laid_out([Span(0, 0, WIDTH, WIDTH, 1, WIDTH, WIDTH + 1)], tables)
    for tokens, size in ((1000, 1024), (1025, None), (1137, None), (1138, 1280), (2848, 3072)):
        layout = replace(one, places=np.zeros(tokens, dtype=np.int64), aside=as_aside(tables))
        layout = replace(layout, rows=layout.rows[:0])
        found = find_forward_bucket(layout, buckets, LAUNCH_BOUND)
        assert (None if found is None else found.tokens) == size


@pytest.mark.parametrize(
    ("hidden_size", "most"), [(1024, 4096), (2048, 4096), (4096, 1024), (5120, 640)]
)
def test_prompts_are_replayed_where_launching_takes_longer_than_computing(hidden_size, most):
    tables = make_tables()
    bound = launch_bound(hidden_size)
    buckets = list_prompts(max_rows=256, most_tokens=min(8192, bound))
    assert max(one.tokens for one in buckets) == most
    assert len(buckets) <= 21, "each is captured at start-up"
    one = laid_out([Span(0, 0, WIDTH, WIDTH, 1, WIDTH, WIDTH + 1)], tables)
    for tokens in range(WIDTH, most + 1):
        layout = replace(one, places=np.zeros(tokens, dtype=np.int64), max_query_len=tokens)
        found = find_forward_bucket(layout, buckets, bound)
        assert found is not None
        assert tokens <= found.tokens <= tokens + max(63, tokens // 4)
        assert (found.rows, found.decided) == (min(256, found.tokens), 0), "any rows, of any kind"
    longer = replace(one, places=np.zeros(most + 1, dtype=np.int64), max_query_len=most + 1)
    assert find_forward_bucket(longer, buckets, bound) is None, "launched"


def as_aside(tables: RowTables) -> AsideLayout:
    return lay_out_aside(
        [Span(0, 0, WIDTH, 0, FULL, 0, 1, aside=1)], tables, first=0, choice_of=lambda _: None
    )


def test_what_does_not_fit_runs_eagerly():
    tables = make_tables()
    layout = laid_out([decoding(0, 3), decoding(1, 4)], tables)
    fits = [Bucket(4, 4, 1, 4)]
    assert find_bucket(layout, fits) == fits[0]
    assert find_bucket(layout, [Bucket(1, 4, 1, 4)]) is None
    assert find_bucket(layout, [Bucket(4, 1, 1, 4)]) is None
    assert find_bucket(layout, [Bucket(4, 4, 1, 1)]) is None
    assert find_bucket(replace(layout, decides=()), fits) is None
    longer = laid_out([Span(0, 0, 2, 2, 1, 2, 3)], tables)
    assert find_bucket(longer, fits) is None
    assert find_bucket(longer, [Bucket(4, 4, 4, 4)]) is not None


def test_the_budget_of_logits_bounds_the_buckets():
    buckets = list_buckets(
        max_rows=256, block=32, max_decide=32, token_budget=8192, logit_limit=441
    )
    assert max(one.decided for one in buckets) <= 441


@pytest.mark.parametrize(
    "what", ["penalties", "bias", "suppress", "mask", "holds_ends", "max_logprobs"]
)
def test_only_plain_and_filtered_rows_are_decided_inside_a_graph(what):
    tables, both = make_tables(), (PLAIN, FILTERED)
    wants = laid_out([decoding(0, 3)], tables).decides[0].wants
    filtered = replace(wants, sampling=True, filters=True, max_top_k=5)
    assert wants.is_plain
    assert replace(wants, sampling=True).is_plain
    assert not filtered.is_plain
    assert captured_choice(wants, both) == PLAIN
    assert captured_choice(filtered, both) == FILTERED
    assert captured_choice(wants, (PLAIN,)) == PLAIN
    assert captured_choice(filtered, (PLAIN,)) is None, "nor by the graph of plain ones"
    for one in (wants, filtered):
        other = replace(one, **{what: 3 if what == "max_logprobs" else True})
        assert not other.is_plain
        assert captured_choice(other, both) is None


def test_filtered_rows_have_a_graph_where_all_logits_exist_at_once():
    few, many = Bucket(4, 4, 1, 4), Bucket(8, 8, 1, 8)
    whole, shared = (partial(captured_choices, logit_chunk=4, has_whole_head=one) for one in (1, 0))
    assert whole(few) == (PLAIN, FILTERED)
    assert whole(many) == shared(few) == (PLAIN,)
    assert whole(few._replace(decided=0)) == ()


def test_plain_rows_share_a_decision_where_logits_come_in_pieces():
    tables = make_tables()
    spans = [decoding(row, 3 + row) for row in range(5)]

    def sizes(rows: list[Span]) -> list[int]:
        layout = lay_out(rows, tables, logits_shift=1, logit_chunk=2)
        return [len(part.positions) for part in layout.decides]

    assert sizes(spans) == [2, 2, 1]
    tables.in_pieces = True
    assert sizes(spans) == [5]
    tables.apply([make_row(5, [1, 2, 3], logprobs=1)], [])
    assert sizes([*spans, decoding(5, 2)]) == [2, 2, 2]


def test_a_part_of_a_plan_decides_for_spans_of_the_plan(seed):
    draw = random.Random(seed)
    tables = make_tables()
    spans = [decoding(row, draw.randrange(20)) for row in range(MAX_ROWS)]
    own = draw.sample(range(MAX_ROWS), 3)
    layout = lay_out(
        [spans[index] for index in own],
        tables,
        logits_shift=1,
        logit_chunk=1000,
        longest_first=True,
    )
    part = numbered(layout, np.array(own)).decides[0]
    for index, row, position in zip(part.spans, part.rows, part.positions, strict=True):
        assert (spans[index].row, spans[index].decide_start) == (row, position)
    assert sorted(layout.decides[0].spans.tolist()) == [0, 1, 2], "the control: numbers of its own"


def test_beside_prompts_fewer_queries_go_later():
    """Whatever an attention library takes for few: what it takes stands last, all of it."""
    tables = make_tables()
    prompts = [Span(row, 0, stop, stop, 1, 0, 0) for row, stop in ((1, 17), (3, 18), (4, 10))]
    spans = [decoding(0, 20), *prompts, decoding(2, 9), Span(5, 20, 22, 22, 1, 0, 0)]
    layout = lay_out(spans, tables, logits_shift=1, logit_chunk=1000, longest_first=True)
    assert layout.rows.tolist() == [3, 1, 4, 5, 0, 2]
    assert layout.decides[0].spans.tolist() == [0, 4]
    spans = [decoding(0, 7), Span(4, 0, 10, 10, 1, 0, 0), decoding(2, 9)]
    layout = lay_out(spans, tables, logits_shift=1, logit_chunk=1000, longest_first=True)
    assert layout.rows.tolist() == [4, 2, 0], "without prompts by keys alone"
    spans = [decoding(0, 20), Span(4, 0, 10, 10, 1, 0, 0), decoding(2, 9)]
    layout = lay_out(spans, tables, logits_shift=1, logit_chunk=1000, longest_first=True)
    assert layout.rows.tolist() == [0, 4, 2], "the control"


def test_the_longest_may_go_first(seed):
    """Only the order of the batch changes: every decision still finds its span of the plan."""
    draw = random.Random(seed)
    tables = make_tables()
    for _ in range(20):
        plain = random_layout(draw, tables)
        spans = list(plain.spans)
        layout = lay_out(spans, tables, logits_shift=1, logit_chunk=1000, longest_first=True)
        assert layout.kv_lens.tolist() == sorted(plain.kv_lens.tolist(), reverse=True)
        assert [span.row for span in layout.spans] == layout.rows.tolist()
        part, rows_of_tokens = layout.decides[0], layout.rows.repeat(np.diff(layout.cu_seqlens))
        assert sorted(part.spans.tolist()) == plain.decides[0].spans.tolist()
        decided = zip(part.spans.tolist(), part.rows, part.positions, part.queries, strict=True)
        for index, row, position, query in decided:
            assert (spans[index].row, spans[index].decide_start) == (row, position)
            assert layout.positions[query] == position - 1
            assert rows_of_tokens[query] == row

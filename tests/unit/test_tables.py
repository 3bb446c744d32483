"""RowTables and the batch built from them, against loops over rows and tokens."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from engine_service.core.step import Canvas, PageAppend, Span
from engine_service.decoding.reveal_knobs import RevealKnobs
from engine_service.sampling.rng import request_seed
from engine_service.staging import stage
from engine_service.worker.batch import ForwardBatch, bind_batch, columns_of
from engine_service.worker.layout import lay_out
from engine_service.worker.tables import RowTables
from tests.row_builders import causal_span, make_row

CPU = torch.device("cpu")
MASK = 99


def make_tables(**changes) -> RowTables:
    fields = {
        "max_rows": 4,
        "table_width": 32,
        "page_size": 4,
        "trash_page": 50,
        "mask_token_id": None,
        "methods": ("autoregressive", "blocks"),
        "device": CPU,
    }
    return RowTables(**(fields | changes))


def test_rows_hold_committed_tokens_then_canvas_then_masks():
    tables = make_tables(mask_token_id=MASK)
    tables.apply([make_row(1, list(range(10)))], [])
    canvas = Canvas(token_ids=(7, MASK, 8), fixed=(True, False, True), step=2)
    tables.apply([make_row(3, [5, MASK], canvas=canvas, prompt_len=1), make_row(1, [4])], [])
    tokens, fixed = tables.sampling.tokens, tables.sampling.fixed
    assert tokens[3].tolist() == [5, MASK, 7, MASK, 8] + [MASK] * 27
    # A literal mask in the prompt is decided; an equal one in the canvas is not.
    assert fixed[3].tolist() == [True, True, True, False, True] + [False] * 27
    assert tokens[1].tolist() == [4] + [MASK] * 31
    assert fixed[1].tolist() == [True] + [False] * 31
    assert (tokens[[0, 2, 4]] == MASK).all()
    assert not fixed[[0, 2, 4]].any()
    assert tables.sampling.banned_ids.tolist() == [MASK]
    assert make_tables().sampling.tokens.sum() == 0


def test_pinned_tokens_stand_behind_the_canvas():
    """A row that is taken by another request forgets them."""
    tables = make_tables(mask_token_id=MASK)
    canvas = Canvas(token_ids=(MASK, 8), fixed=(False, True))
    pinned = ((4, 20), (6, 0), (31, 21))
    other = make_row(1, list(range(9)))
    new = make_row(3, [5, 6], canvas=canvas)._replace(pinned=pinned)
    tables.apply([make_row(0, [1])._replace(pinned=((1, 9),)), new, other], [])
    tokens, fixed = tables.sampling.tokens, tables.sampling.fixed
    assert tokens[3].tolist() == [5, 6, MASK, 8, 20, MASK, 0] + [MASK] * 24 + [21]
    assert fixed[3].nonzero().flatten().tolist() == [0, 1, 3, 4, 6, 31]
    assert tokens[0].tolist() == [1, 9] + [MASK] * 30
    assert tokens[1].tolist() == list(range(9)) + [MASK] * 23
    tables.apply([make_row(3, [5])], [])
    assert tokens[3].tolist() == [5] + [MASK] * 31
    assert fixed[3].sum() == 1


def test_parameters_reach_their_rows():
    tables = make_tables()
    asked = {
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 7,
        "min_p": 0.125,
        "repetition_penalty": 1.5,
        "presence_penalty": 0.75,
        "frequency_penalty": -0.5,
        "min_tokens": 3,
    }
    tables.apply([make_row(2, [1, 2], **asked, seed=11, choice=2), make_row(0, [1])], [])
    sampling = tables.sampling
    assert {name: getattr(sampling, name)[2].item() for name in asked} == asked
    assert sampling.seeds[2].item() == request_seed(11, 2)
    assert sampling.prompt_lens.tolist() == [1, 0, 2, 0, 0]
    neutral = {name: getattr(sampling, name)[0].item() for name in asked}
    fresh = {name: getattr(sampling, name)[1].item() for name in asked}
    assert neutral == fresh  # an untouched row, such as the trash row, changes nothing


def test_slots_widen_and_are_overwritten():
    tables = make_tables()
    many = {token: token / 2 for token in range(20)}
    tables.apply([make_row(0, [1], logit_bias={3: 1.5}, suppress=(1, 2), min_tokens=1)], [])
    tables.apply([make_row(1, [1], logit_bias=many, suppress=tuple(range(9)))], [])
    sampling = tables.sampling
    assert sampling.bias_ids[0, :2].tolist() == [3, -1]
    assert sampling.bias_values[0, 0].item() == 1.5
    assert sampling.bias_ids[1].tolist() == list(range(20))
    assert sampling.bias_values[1, :20].tolist() == list(many.values())
    assert sampling.suppress_ids[0, :3].tolist() == [1, 2, -1]
    tables.apply([make_row(1, [1])], [])
    assert (tables.sampling.bias_ids[1] == -1).all()
    assert (tables.sampling.suppress_ids[1] == -1).all()


def test_pages_append_and_a_new_row_forgets_the_old_ones():
    tables = make_tables()
    tables.apply(
        [make_row(0, [1]), make_row(2, [1])],
        [PageAppend(0, 0, (3, 1)), PageAppend(2, 0, (9,)), PageAppend(0, 2, (6,))],
    )
    assert tables.pages.on_device[0, :4].tolist() == [3, 1, 6, 50]
    assert tables.pages.on_device[2, :2].tolist() == [9, 50]
    tables.apply([make_row(0, [2])], [PageAppend(0, 0, (8,))])
    assert tables.pages.on_device[0].tolist() == [8] + [50] * 7
    assert tables.pages.on_device.tolist() == tables.pages.on_host.tolist()
    with pytest.raises(AssertionError, match="row 0: page 7 of 8"):
        tables.apply([], [PageAppend(0, 7, (1, 2))])


def test_rows_that_hold_ends_back_say_so_and_only_they():
    tables = make_tables()
    knobs = [
        RevealKnobs(remasking="low_confidence", steps=1, eos_last=one) for one in (True, False)
    ]
    rows = [make_row(row, [1])._replace(params=own) for row, own in enumerate(knobs)]
    tables.apply([*rows, make_row(2, [1])], [])
    assert tables.wants(np.array([0]), 1).holds_ends
    assert tables.wants(np.array([1, 0]), 1).holds_ends
    assert tables.wants(np.array([1, 2]), 1).is_plain
    tables.apply([rows[1]._replace(row=0)], [])
    assert tables.wants(np.array([0]), 1).is_plain


def test_wants_is_the_union_of_the_rows():
    tables = make_tables()
    tables.apply(
        [
            make_row(0, [1], top_k=5, logprobs=0),
            make_row(1, [1], temperature=1.0, top_k=5),
            make_row(2, [1], temperature=1.0, min_tokens=2, suppress=(3,), logprobs=4),
            make_row(3, [1, 2], presence_penalty=0.1, logit_bias={1: 1.0}),
        ],
        [],
    )

    def wants(*rows, at=1):
        return tables.wants(np.array(rows), at)

    greedy = wants(0)
    assert not any((greedy.sampling, greedy.filters, greedy.penalties, greedy.bias))
    assert greedy.max_logprobs == 0
    assert wants(1).filters
    assert wants(0, 1).max_top_k == 5
    assert wants(1, 2).max_top_k is None
    assert wants(1).max_logprobs is None
    assert wants(0, 2).max_logprobs == 4
    assert wants(2, at=2).suppress
    assert not wants(2, at=3).suppress
    assert wants(0, 3).penalties
    assert wants(0, 3).bias


def build_batch(spans: list[Span], tables: RowTables, **how: int) -> ForwardBatch:
    layout = lay_out(spans, tables, **how)
    return bind_batch(layout, stage(columns_of(layout), tables.device), tables)


def random_spans(rng: random.Random, tables: RowTables) -> list[Span]:
    spans = []
    for row in rng.sample(range(4), rng.randint(1, 4)):
        block = rng.choice([1, 4])
        start = rng.randrange(0, 16) // block * block
        stop = start + rng.randint(1, 3) * block
        decides = rng.random() < 0.7
        first = rng.randint(start + 1, stop) if decides else stop
        last = rng.randint(first, stop) if decides else stop
        spans.append(Span(row, start, stop, stop, block, first, last))
    return spans


@pytest.mark.parametrize("seed", range(30))
def test_batch_equals_loops(seed):
    rng = random.Random(seed)
    shift = rng.choice([0, 1])
    tables = make_tables()
    rows = [
        make_row(row, [rng.randrange(90) for _ in range(24)], method="blocks") for row in range(4)
    ]
    rows[1] = rows[1]._replace(method="autoregressive")
    pages = rng.sample(range(50), 32)
    appends = [PageAppend(row, 0, tuple(pages[row * 8 : row * 8 + 8])) for row in range(4)]
    tables.apply(rows, appends)
    spans = random_spans(rng, tables)
    limit = rng.choice([1, 3, 100])
    batch = build_batch(spans, tables, logits_shift=shift, logit_chunk=limit)
    flat = [(index, place) for index, s in enumerate(spans) for place in range(s.start, s.stop)]
    attention = batch.attention
    input_ids = tables.sampling.tokens.view(-1)[batch.places]
    assert input_ids.tolist() == [rows[spans[i].row].token_ids[p] for i, p in flat]
    assert attention.positions.tolist() == [p for _, p in flat]
    assert attention.slot_mapping.tolist() == [
        pages[spans[i].row * 8 + p // 4] * 4 + p % 4 for i, p in flat
    ]
    assert attention.kv_lens.tolist() == [s.kv_len for s in spans]
    width = -(-max(s.kv_len for s in spans) // 4)
    assert attention.page_table.tolist() == [pages[s.row * 8 :][:width] for s in spans]
    assert attention.all_causal == all(s.mask_block == 1 for s in spans)
    assert list(attention.spans) == spans
    lengths = {s.num_tokens for s in spans}
    assert attention.uniform_query_len == (lengths.pop() if len(lengths) == 1 else None)
    seen = []
    for part in batch.decides:
        assert len(part.positions) <= limit or len(part.layout.spans) == 1
        expected = [
            (spans[i].row, p, flat.index((i, p - shift)))
            for i in part.layout.spans
            for p in range(spans[i].decide_start, spans[i].decide_stop)
        ]
        got = zip(part.rows.tolist(), part.positions.tolist(), part.queries.tolist(), strict=True)
        assert list(got) == expected
        assert part.cu_decide.tolist() == [0, *np.cumsum(part.layout.counts).tolist()]
        assert part.span_rows.tolist() == [spans[i].row for i in part.layout.spans]
        methods = {rows[spans[i].row].method for i in part.layout.spans}
        assert methods == {("autoregressive", "blocks")[part.layout.method]}
        seen += part.layout.spans.tolist()
    assert sorted(seen) == [i for i, s in enumerate(spans) if s.decide_stop > s.decide_start]


def test_logits_outside_of_the_span_are_a_bug():
    tables = make_tables()
    tables.apply([make_row(0, [1, 2, 3])], [PageAppend(0, 0, (0,))])
    before_the_first_query = Span(0, 1, 3, 3, 1, 1, 2)
    with pytest.raises(AssertionError, match="outside"):
        build_batch([before_the_first_query], tables, logits_shift=1, logit_chunk=8)
    build_batch([causal_span(0, 1, 3, decides=True)], tables, logits_shift=1, logit_chunk=8)


def test_stage_wraps_without_changing_anything():
    arrays = [np.arange(3), np.ones((2, 2), dtype=np.float32), np.array([True])]
    staged = stage(arrays, CPU)
    for tensor, array in zip(staged, arrays, strict=True):
        assert tensor.tolist() == array.tolist()
        assert tuple(tensor.shape) == array.shape

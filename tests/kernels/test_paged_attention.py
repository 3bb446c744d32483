"""The paged kernels equal the span-by-span reference for every mask, layout, format and split."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial

import pytest
import torch

from engine_service.attention import triton
from engine_service.attention.base import AttentionBatch, AttentionShape, LayerCache
from engine_service.attention.reference import ReferenceBackend
from engine_service.attention.triton import TritonBackend
from engine_service.core.step import FULL, Span
from engine_service.kernels.paged_attention import long_tiles, paged_attention_triton
from engine_service.kernels.paged_decode import (
    new_parts,
    paged_decode_triton,
    short_rows,
    short_tiles,
)
from engine_service.kernels.paged_tiles import Spans, Tiles
from tests.models.paged import PageTable, causal, poisoned

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SCALE = 0.3
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@dataclass
class Problem:
    """One step over a filled cache whose other slots are NaN, and its right answer."""

    shape: AttentionShape
    batch: AttentionBatch
    cache: LayerCache
    q: torch.Tensor
    window: int | None

    @property
    def spans(self) -> Spans:
        batch = self.batch
        return Spans(
            batch.cu_seqlens_q, batch.positions, batch.kv_lens, batch.mask_block, batch.page_table
        )

    def want(self) -> torch.Tensor:
        backend = ReferenceBackend(self.shape)
        plan = backend.plan(self.batch, window=self.window)
        return backend.attend(self.q, cache=self.cache, plan=plan, scale=SCALE)

    def long(self, tiles: Tiles) -> torch.Tensor:
        k, v = self.cache.k, self.cache.v
        return paged_attention_triton(
            self.q, k, v, self.spans, scale=SCALE, window=self.window, tiles=tiles
        )

    def short(self, num_splits: int, tiles: Tiles | None = None, repeats: int = 1) -> torch.Tensor:
        """Also checks that the parts are left as the next layer needs them."""
        shape, batch = self.shape, self.batch
        rows = short_rows(batch.max_query_len, shape.group_size)
        assert rows is not None
        tiles = tiles or short_tiles(rows, shape.head_dim, shape.dtype)
        parts = None
        if num_splits > 1:
            size = (batch.kv_lens.shape[0], shape.num_kv_heads, num_splits)
            parts = new_parts(*size, tiles.block_m, shape.head_dim, DEVICE)
        for _ in range(repeats):
            out = paged_decode_triton(
                self.q,
                self.cache.k,
                self.cache.v,
                self.spans,
                scale=SCALE,
                window=self.window,
                tiles=tiles,
                parts=parts,
                one_query=batch.uniform_query_len == 1,
            )
            assert parts is None or not parts.arrived.any()
        return out


def problem(
    spans: Sequence[Span],
    seed: int,
    *,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 16,
    page_size: int = 16,
    dtype: torch.dtype = torch.float32,
    window: int | None = None,
    head_major: bool = True,
) -> Problem:
    shape = AttentionShape(
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=head_dim,
        page_size=page_size,
        dtype=dtype,
    )
    table = PageTable(len(spans), max(span.kv_len for span in spans), page_size, seed)
    spans = [span._replace(row=row) for row, span in enumerate(spans)]
    backend = (TritonBackend if head_major else ReferenceBackend)(shape)
    cache = poisoned(backend.empty_cache(table.num_pages, torch.device("cpu")))
    generator = torch.Generator().manual_seed(seed)
    for span in spans:
        position = torch.arange(span.kv_len)
        page = table.rows[span.row, position // page_size]
        for kept in (cache.k, cache.v):
            new = torch.randn(span.kv_len, heads[1], head_dim, generator=generator)
            kept[page, position % page_size] = new.to(dtype)
    batch = on_device(table.batch(spans))
    # Queries are a view into what the projection writes.
    qkv = torch.randn(len(batch.positions), sum(heads) + heads[1], head_dim, generator=generator)
    q = qkv.to(DEVICE, dtype)[:, : heads[0]]
    cache = LayerCache(k=cache.k.to(DEVICE), v=cache.v.to(DEVICE))
    return Problem(shape, batch, cache, q, window)


def on_device(batch: AttentionBatch) -> AttentionBatch:
    values = {field.name: getattr(batch, field.name) for field in fields(batch)}
    tensors = {name: x.to(DEVICE) for name, x in values.items() if isinstance(x, torch.Tensor)}
    return replace(batch, **tensors)


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    tolerance = TOLERANCE[want.dtype]
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def ragged(seed: int, longest: int, max_kv_len: int, count: int = 4) -> list[Span]:
    """Spans of every mask, some of one query, some at the end of a cache that goes on behind it."""
    draw = random.Random(seed)
    spans = []
    for row in range(count):
        block = draw.choice([1, 1, 4, 32, FULL])
        length = draw.choice([1, draw.randint(1, longest), longest])
        start = draw.randint(0, max_kv_len - length)
        end = start + length
        seen = min((end - 1) // block * block + block, max_kv_len) if block < FULL else end
        kv_len = max(draw.choice([end, seen]), end)
        spans.append(Span(row, start, end, kv_len, block, 0, 0))
    return spans


SMALL = Tiles(16, 16, 4, 2)
CUTS = [
    # page size, tile: a page holds tiles, a tile spans pages, neither divides the other
    (32, Tiles(32, 16, 4, 2)),
    (4, SMALL),
    (24, SMALL),
]


@pytest.mark.parametrize(("page_size", "tiles"), CUTS)
@pytest.mark.parametrize("window", [None, 1, 21])
def test_long_queries(page_size: int, tiles: Tiles, window: int | None, seed: int) -> None:
    step = problem(ragged(seed, 40, 90), seed, page_size=page_size, window=window)
    close(step.long(tiles), step.want())


@pytest.mark.parametrize(("page_size", "tiles"), CUTS)
@pytest.mark.parametrize(("window", "num_splits"), [(None, 1), (None, 3), (21, 1), (150, 4)])
def test_short_queries(
    page_size: int, tiles: Tiles, window: int | None, num_splits: int, seed: int
) -> None:
    step = problem(ragged(seed, 8, 420, count=3), seed, page_size=page_size, window=window)
    close(step.short(num_splits, tiles, repeats=2), step.want())


@pytest.mark.parametrize("max_keys", [None, 384])
@pytest.mark.parametrize("num_programs", [1, 384, 1024])
@pytest.mark.parametrize("block", [1, 4, 8, 32])
def test_cuts_for_many_programs(
    block: int, num_programs: int, max_keys: int | None, seed: int
) -> None:
    """Blocks of several lengths, whose tiles are cut by how many programs there are."""
    spans = [
        Span(row, start, start + block, start + block, block, 0, 0)
        for row, start in enumerate((0, 96, 288))
    ]
    step = problem(spans, seed, heads=(4, 1), head_dim=64, dtype=torch.bfloat16)
    rows = short_rows(block, 4)
    assert rows is not None
    tiles = short_tiles(rows, step.shape.head_dim, torch.bfloat16, num_programs, max_keys)
    close(step.short(2, tiles), step.want())


@pytest.mark.parametrize("window", [None, 150])
@pytest.mark.parametrize("heads", [(4, 2), (6, 2), (2, 2)])
def test_one_query_each(heads: tuple[int, int], window: int | None, seed: int) -> None:
    """Also where a query is not the last key: then its position matters."""
    draw = random.Random(seed)
    spans = [
        Span(row, start, start + 1, start + draw.choice([1, 40]), draw.choice([1, 32, FULL]), 0, 0)
        for row, start in enumerate((0, 290, draw.randint(500, 900)))
    ]
    step = problem(spans, seed, heads=heads, window=window)
    assert step.batch.uniform_query_len == 1
    want = step.want()
    for num_splits in (1, 2, 5):
        close(step.short(num_splits, SMALL, repeats=2), want)


@pytest.mark.parametrize("heads", [(3, 3), (4, 2), (6, 2), (8, 1), (7, 1)])
@pytest.mark.parametrize("head_dim", [8, 40, 128])
def test_heads(heads: tuple[int, int], head_dim: int, seed: int) -> None:
    step = problem(ragged(seed, 3, 60, count=2), seed, heads=heads, head_dim=head_dim)
    want = step.want()
    close(step.short(2), want)
    close(step.long(SMALL), want)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("head_dim", [64, 256])
@pytest.mark.parametrize("head_major", [True, False])
def test_formats_and_default_tiles(
    dtype: torch.dtype, head_dim: int, head_major: bool, seed: int
) -> None:
    step = problem(
        ragged(seed, 5, 300, count=2),
        seed,
        head_dim=head_dim,
        page_size=64,
        dtype=dtype,
        head_major=head_major,
    )
    want = step.want()
    close(step.short(1), want)
    close(step.short(3), want)
    close(step.long(long_tiles(head_dim, dtype)), want)


def test_more_spans_than_the_search_reads_at_once(seed: int) -> None:
    spans = [causal(row, row % 3, row % 3 + 1 + row % 2) for row in range(260)]
    step = problem(spans, seed, heads=(1, 1))
    close(step.long(SMALL), step.want())


def test_empty_spans_and_queries_of_nobody(seed: int) -> None:
    """A captured graph is padded with spans of no queries and with tokens behind the last span."""
    step = problem([causal(0, 30, 33), causal(1, 0, 2), causal(2, 5, 6)], seed)
    want = step.want()[:3]
    cu_seqlens = torch.tensor([0, 3, 3, 3], dtype=torch.int32, device=DEVICE)
    kv_lens = torch.tensor([33, 0, 0], dtype=torch.int32, device=DEVICE)
    step.batch = replace(step.batch, cu_seqlens_q=cu_seqlens, kv_lens=kv_lens)
    for got in (step.short(1), step.short(2), step.long(SMALL)):
        close(got[:3], want)


def test_a_query_that_sees_nothing_is_zero(seed: int) -> None:
    step = problem([causal(0, 30, 31), causal(1, 8, 9)], seed)
    kv_lens = torch.tensor([31, 0], dtype=torch.int32, device=DEVICE)
    step.batch = replace(step.batch, kv_lens=kv_lens)
    for got in (step.short(1), step.short(2), step.long(SMALL)):
        assert got[0].abs().max() > 0
        assert not got[1].any()


@pytest.mark.parametrize("rule", ["window", "mask_block", "kv_len", "page"])
def test_a_broken_rule_shows(rule: str, seed: int) -> None:
    """Negative control: each clause of the mask rule and the page table change the output."""
    step = problem([Span(0, 40, 42, 44, 4, 0, 0)], seed)
    want = step.want()
    if rule == "window":
        step.window = 30
    elif rule == "page":
        step.batch = replace(step.batch, page_table=step.batch.page_table[:, [0, 0, 2]])
    else:
        wrong = torch.full_like(step.batch.kv_lens, {"mask_block": 1, "kv_len": 43}[rule])
        field = "kv_lens" if rule == "kv_len" else rule
        step.batch = replace(step.batch, **{field: wrong})
    for got in (step.short(1), step.short(2), step.long(SMALL)):
        assert (got - want).abs().max() > 1e-3


@pytest.mark.parametrize("longest", [1, 8, 70])
def test_backend(longest: int, seed: int) -> None:
    """`TritonBackend` picks kernel and split; it is right with either."""
    step = problem(ragged(seed, longest, 200, count=3), seed)
    backend = TritonBackend(step.shape)
    plan = backend.plan(step.batch, window=None)
    assert (plan.short is None) == (short_rows(step.batch.max_query_len, 2) is None)
    got = backend.attend(step.q, cache=step.cache, plan=plan, scale=SCALE)
    assert got.is_contiguous()
    close(got, step.want())


def test_backend_takes_the_long_kernel_where_no_short_tile_fits(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = problem(ragged(seed, 8, 200, count=3), seed)
    plan = TritonBackend(step.shape).plan(step.batch, window=None)
    assert plan.short is not None, "the control"
    monkeypatch.setattr(triton, "most_rows", lambda *_: 0)
    backend = TritonBackend(step.shape)
    plan = backend.plan(step.batch, window=None)
    assert (plan.short, plan.long_queries) == (None, 0)
    close(backend.attend(step.q, cache=step.cache, plan=plan, scale=SCALE), step.want())


def test_short_queries_beside_long_ones(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kernel computes its spans and leaves the other's alone, whatever their order."""
    monkeypatch.setattr(triton, "_WORTH_KEYS", 300)
    spans = [causal(0, 400, 401), causal(1, 10, 80), Span(2, 30, 38, 40, 4, 0, 0)]
    spans += [causal(3, 20, 29), causal(4, 5, 6)]
    step = problem(spans, seed)
    backend = TritonBackend(step.shape)
    plan = backend.plan(step.batch, window=None)
    assert plan.short is not None
    assert plan.long_queries == 9

    def attend(long_queries: int) -> torch.Tensor:
        cut = plan._replace(long_queries=long_queries)
        return backend.attend(step.q, cache=step.cache, plan=cut, scale=SCALE)

    # What nobody writes would otherwise be the right answer of an earlier call.
    monkeypatch.setattr(torch, "empty", partial(torch.full, fill_value=float("nan")))
    got, forgotten = attend(9), attend(10)
    monkeypatch.undo()
    close(got, step.want())
    start, stop = step.batch.cu_seqlens_q[3:5].tolist()
    assert forgotten[start:stop].isnan().all()


def test_few_queries_are_written_beside_what_is_there(seed: int) -> None:
    """What another library has computed of the longer ones stays as it is."""
    spans = [causal(1, 10, 80), causal(0, 400, 401), Span(2, 30, 38, 40, 4, 0, 0)]
    step = problem(spans, seed)
    backend = TritonBackend(step.shape)
    assert backend.few_queries == 8
    plan = backend.plan_few(step.batch, window=None)
    out = torch.full_like(step.q, 7.0)
    backend.attend_few(step.q, cache=step.cache, plan=plan, scale=SCALE, out_THD=out)
    assert (out[:70] == 7.0).all()
    close(out[70:], step.want()[70:])
    assert (step.want()[70:] != 7.0).all(), "the control"


def test_a_prompt_beside_them_splits_no_window(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Programs that find no keys cost time: two splits are enough for 300 keys of a window."""
    spans = [causal(0, 0, 4000), causal(1, 4000, 4001)]
    batch = problem(spans, seed).batch
    monkeypatch.setattr(triton, "_num_sms", lambda _: triton._INTERPRETED_SMS)
    backend = TritonBackend(problem(spans[1:], seed).shape)
    plans = [backend.plan_few(batch, window=window) for window in (520, None)]
    splits = [plan.parts.acc.shape[2] for plan in plans if plan.parts is not None]
    assert splits == [2, 3]


def test_a_captured_step_is_one_launch(seed: int) -> None:
    """Without spans on the host, and where short queries see little."""
    step = problem([causal(0, 3000, 3001), causal(1, 0, 70)], seed)
    backend = TritonBackend(step.shape)
    assert backend.plan(step.batch, window=None).short is not None
    captured = backend.plan(replace(step.batch, spans=None), window=None)
    assert captured.short is None
    assert captured.long_queries == 0
    step = problem([causal(0, 100, 101), causal(1, 0, 70)], seed)
    assert backend.plan(step.batch, window=None).short is None


@pytest.mark.gpu
@pytest.mark.parametrize("longest", [1, 70])
def test_a_captured_step_serves_others(longest: int, seed: int) -> None:
    """Only tensors change between replays: lengths, masks and pages are read on the device."""
    spans = [causal(row, 100 * row, 100 * row + longest) for row in range(4)]
    first, second = (problem(spans, seed + offset) for offset in (0, 1))
    short = [span._replace(start=3, stop=3 + longest, kv_len=3 + longest) for span in spans]
    third = problem(short, seed)
    backend = TritonBackend(first.shape)

    def run() -> torch.Tensor:
        plan = backend.plan(first.batch, window=None)
        return backend.attend(first.q, cache=first.cache, plan=plan, scale=SCALE)

    close(run(), first.want())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for other in (second, third):
        for name in ("positions", "kv_lens", "mask_block"):
            getattr(first.batch, name).copy_(getattr(other.batch, name))
        first.batch.page_table[:, : other.batch.page_table.shape[1]] = other.batch.page_table
        pages = other.cache.k.shape[0]
        first.cache.k[:pages], first.cache.v[:pages] = other.cache.k, other.cache.v
        first.q.copy_(other.q)
        graph.replay()
        close(out, other.want())

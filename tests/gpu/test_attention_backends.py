"""Every attention library of this machine equals the reference on the device."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

import pytest
import torch

from engine_service.attention import flash
from engine_service.attention.base import (
    AttentionBackend,
    AttentionBatch,
    AttentionShape,
    LayerCache,
    plan_step,
)
from engine_service.attention.flash import FlashBackend, FlashPlan
from engine_service.attention.reference import ReferenceBackend
from engine_service.attention.select import (
    create_backend,
    open_backend,
    rank_backends,
    read_capability,
)
from engine_service.core.step import FULL, Span
from tests.models.paged import PageTable, attend_steps, causal, random_steps

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""Largest difference relative to the largest output."""


def shape_of(
    *,
    group: int = 4,
    kv_heads: int = 2,
    head_dim: int = 128,
    page_size: int = 64,
    dtype: torch.dtype = torch.bfloat16,
) -> AttentionShape:
    return AttentionShape(
        num_heads=group * kv_heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        dtype=dtype,
    )


def libraries(shape: AttentionShape) -> list[AttentionBackend]:
    """All that can serve the shape here, the fastest first."""
    choices = rank_backends("auto", read_capability(shape, CUDA))
    return [create_backend(choice.name, shape) for choice in choices]


def difference(got: list[torch.Tensor], want: list[torch.Tensor]) -> float:
    """The worst step's; NaN where a step holds one."""
    off = [
        (left.float() - right.float()).abs().max() / right.float().abs().max()
        for left, right in zip(got, want, strict=True)
    ]
    return float(torch.stack(off).max())


def attend_all(
    backend: AttentionBackend, batch: AttentionBatch, q: torch.Tensor, cache: LayerCache
) -> torch.Tensor:
    plan = backend.plan(batch, window=None)
    return backend.attend(q, cache=cache, plan=plan, scale=0.09)


def check(
    shape: AttentionShape, steps: list[list[Span]], window: int | None, seed: int, rows: int
) -> None:
    longest = max(span.stop for spans in steps for span in spans)
    table = PageTable(rows, longest, shape.page_size, seed, CUDA)
    scale = shape.head_dim**-0.5
    want = attend_steps(ReferenceBackend(shape), table, steps, window, scale=scale)
    for backend in libraries(shape):
        got = attend_steps(backend, table, steps, window, scale=scale)
        off = difference(got, want)
        assert off <= TOLERANCE[shape.dtype], f"{backend.name} is off by {off}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("window", [None, 1, 100])
@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_mixed_steps(
    head_dim: int, page_size: int, window: int | None, dtype: torch.dtype, seed: int
) -> None:
    """Rows that decode beside rows with prompts, each row with its own mask."""
    shape = shape_of(head_dim=head_dim, page_size=page_size, dtype=dtype)
    lengths = (1, 1, 2, 5, 40, 130)
    for number, blocks in enumerate([(1,), (1, 4, 32, FULL), (32,)]):
        draw = random.Random(seed + number)
        steps = random_steps(draw, 6, 700, blocks=blocks, lengths=lengths)
        check(shape, steps, window, seed, rows=6)


@pytest.mark.parametrize("group", range(1, 9))
def test_every_group_size(group: int, seed: int) -> None:
    steps = [
        [causal(0, 0, 300), causal(1, 0, 64), causal(2, 0, 1)],
        [causal(0, 300, 301), causal(1, 64, 200), causal(2, 1, 2)],
        [causal(0, 301, 302), causal(1, 200, 201), causal(2, 2, 3)],
    ]
    for dtype in TOLERANCE:
        check(shape_of(group=group, dtype=dtype), steps, None, seed, rows=3)


@pytest.mark.parametrize("head_dim", [32, 80, 96, 192, 256])
def test_other_head_sizes(head_dim: int, seed: int) -> None:
    steps = [[causal(0, 0, 300), causal(1, 0, 17)], [causal(0, 300, 301), causal(1, 17, 18)]]
    for dtype in (torch.bfloat16, torch.float32):
        check(shape_of(head_dim=head_dim, dtype=dtype), steps, None, seed, rows=2)


def test_long_contexts(seed: int) -> None:
    """Keys are split among many programs, and prompts continue far behind their start."""
    steps = [[causal(0, 0, 9000)], [causal(0, 9000, 9001)], [causal(0, 9001, 9300)]]
    for window in (None, 1024):
        check(shape_of(), steps, window, seed, rows=1)


def test_flash_attention_computes_prompts_and_whole_blocks(seed: int) -> None:
    """The comparison above would pass if FlashAttention were never called."""
    shape = shape_of()
    having = [backend for backend in libraries(shape) if isinstance(backend, FlashBackend)]
    if not having:
        pytest.skip("FlashAttention is not installed")
    table = PageTable(2, 512, shape.page_size, seed, CUDA)
    steps = [[causal(0, 0, 400), causal(1, 0, 64)], [causal(0, 400, 500, FULL)]]
    for backend in having:
        plans = [backend.plan(table.batch(spans), window=None) for spans in steps]
        masks = [plan.causal for plan in plans if isinstance(plan, FlashPlan)]
        assert masks == [True, False]
    check(shape, steps, None, seed, rows=2)


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("group", [1, 2, 4, 8, 16])
def test_few_queries_beside_prompts_are_launched_by_themselves(
    group: int, window: int | None, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(flash, "_WORTH_KEYS", 1)
    shape = shape_of(group=group)
    having = [backend for backend in libraries(shape) if isinstance(backend, FlashBackend)]
    if not having:
        pytest.skip("FlashAttention is not installed")
    prompts = [causal(row, 0, 300 + 70 * row) for row in range(5)]
    step = [causal(0, 300, 400), causal(4, 580, 600), *(causal(row, n, n + 1) for row, n in
            ((3, 510), (2, 440), (1, 370)))]  # fmt: skip
    table = PageTable(5, 700, shape.page_size, seed, CUDA)
    for backend in having:
        plan = backend.plan(table.batch(step), window=window)
        assert isinstance(plan, FlashPlan)
        assert plan.few is not None
        assert len(plan.batch.kv_lens) == 2
    check(shape, [prompts, step], window, seed, rows=5)


def test_pages_of_one_key_tile(seed: int) -> None:
    """FlashAttention 4 reads such pages whole: what nobody wrote is 0 there, as in an engine."""
    shape = shape_of(page_size=128)
    table = PageTable(1, 200, shape.page_size, seed, CUDA)
    batch = table.batch([causal(0, 0, 200)])
    outputs = []
    for backend in (ReferenceBackend(shape), *libraries(shape)):
        draw = torch.Generator(CUDA).manual_seed(seed)
        cache = backend.empty_cache(table.num_pages, CUDA)
        q, k, v = (
            torch.randn(200, heads, 128, generator=draw, device=CUDA).to(shape.dtype)
            for heads in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
        )
        step = plan_step(backend, batch, windows=[None], caches=[cache])
        backend.store(k, v, cache=cache, plan=step.plans[None], slots=step.slots)
        outputs.append(backend.attend(q, cache=cache, plan=step.plans[None], scale=0.09))
    for got in outputs[1:]:
        assert difference([got], outputs[:1]) <= TOLERANCE[shape.dtype]


@pytest.mark.parametrize("length", [1, 32, 100])
def test_captured_steps_follow_their_tensors(length: int, seed: int) -> None:
    """One graph serves other lengths, pages and masks of the same sizes, spans unknown."""
    shape = shape_of()
    table = PageTable(3, 1000, shape.page_size, seed, CUDA)
    first = [causal(row, 0, length) for row in range(3)]
    then = [causal(row, 100 * row, 100 * row + length) for row in (2, 0, 1)]
    for backend in libraries(shape):
        if not backend.capturable:
            continue
        cache = backend.empty_cache(table.num_pages, CUDA)
        cache.k.normal_()
        cache.v.normal_()
        q = torch.randn(3 * length, shape.num_heads, 128, device=CUDA, dtype=shape.dtype)
        batch, other = (
            replace(table.batch(spans, on_host=False), max_kv_len=1000) for spans in (first, then)
        )

        attend = partial(attend_all, backend, batch, q, cache)
        attend()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = attend()
        for name in ("cu_seqlens_q", "positions", "kv_lens", "mask_block", "page_table"):
            getattr(batch, name).copy_(getattr(other, name))
        graph.replay()
        reference = ReferenceBackend(shape)
        want = attend_all(reference, other, q, cache)
        assert difference([captured], [want]) <= TOLERANCE[shape.dtype], backend.name


def test_the_engine_takes_a_fast_library(seed: int) -> None:
    backend, reason = open_backend("auto", shape_of(), CUDA, windows=[None, 100])
    assert backend.capturable, reason


def test_a_window_of_one_key_more_shows(seed: int) -> None:
    """Negative control: the tolerance is finer than the smallest mistake of a mask."""
    shape = shape_of()
    table = PageTable(1, 300, shape.page_size, seed, CUDA)
    steps = [[causal(0, 0, 300)], [causal(0, 299, 300)]]
    want = attend_steps(ReferenceBackend(shape), table, steps, 100)
    for backend in libraries(shape):
        assert difference(attend_steps(backend, table, steps, 101), want) > TOLERANCE[shape.dtype]

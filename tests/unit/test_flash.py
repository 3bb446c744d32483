"""FlashBackend: which steps FlashAttention gets, in which of its words, and what a failure costs.

The libraries do not run here: stand-ins with their published signatures compute what these promise.
"""

from __future__ import annotations

import logging
import random
import warnings
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine_service.attention import flash
from engine_service.attention.base import (
    AttentionBackend,
    AttentionBatch,
    AttentionShape,
    LayerCache,
)
from engine_service.attention.flash import (
    FlashBackend,
    FlashCall,
    FlashPlan,
    load_flash2,
    load_flash3,
    load_flash4,
)
from engine_service.attention.reference import ReferenceBackend
from engine_service.core.step import FULL, Span
from tests.models.paged import PageTable, attend_steps, causal, random_steps
from tests.unit.flash_libraries import dense, kvcache3, stand_in, varlen2, varlen4

SHAPE = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=8, page_size=16, dtype=torch.float64)


GENERATIONS = [
    (load_flash4, "flash_attn.cute", "flash_attn_varlen_func", varlen4),
    (load_flash3, "flash_attn_interface", "flash_attn_with_kvcache", kvcache3),
    (load_flash2, "flash_attn", "flash_attn_varlen_func", varlen2),
]


class Counted(FlashBackend):
    """Counts the steps that FlashAttention gets."""

    def __init__(self, call: FlashCall, short: AttentionBackend | None = None) -> None:
        super().__init__(SHAPE, call, short or ReferenceBackend(SHAPE))
        self.long = 0
        self.broken_from_here = False

    def plan(self, *args: Any, **kwargs: Any) -> object:
        plan = super().plan(*args, **kwargs)
        self.long += isinstance(plan, FlashPlan)
        return plan


class Few(ReferenceBackend):
    """Has a launch for spans of up to two queries."""

    few_queries = 2
    forgets = False

    def plan_few(self, batch: AttentionBatch, *, window: int | None) -> object:
        return batch, self.plan(batch, window=window)

    def attend_few(
        self,
        q_THD: torch.Tensor,
        *,
        cache: LayerCache,
        plan: Any,
        scale: float,
        out_THD: torch.Tensor,
    ) -> None:
        batch, whole = plan
        out = self.attend(q_THD, cache=cache, plan=whole, scale=scale)
        for first, stop in pairwise(batch.cu_seqlens_q.tolist()):
            if stop - first <= 2 and not self.forgets:
                out_THD[first:stop] = out[first:stop]


def computed_call(q: torch.Tensor, cache: Any, plan: FlashPlan, scale: float) -> torch.Tensor:
    batch, window = plan.batch, plan.window
    bounds = (None, None) if window is None else (window - 1, 0)
    return dense(
        q, (cache.k, cache.v), batch.cu_seqlens_q, batch.kv_lens, batch.page_table, scale,
        plan.causal, bounds,
    )  # fmt: skip


@pytest.mark.parametrize("window", [None, 1, 40])
@pytest.mark.parametrize(("load", "path", "name", "function"), GENERATIONS)
def test_every_generation_equals_the_reference(
    load: Callable[[], FlashCall],
    path: str,
    name: str,
    function: object,
    window: int | None,
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
) -> None:
    table = PageTable(2, 200, SHAPE.page_size, seed)
    steps = [[causal(0, 0, 70), causal(1, 0, 64)], [causal(0, 70, 200), causal(1, 64, 65)]]
    backend = Counted(stand_in(monkeypatch, load, path, **{name: function}))
    want = attend_steps(ReferenceBackend(SHAPE), table, steps, window)
    for left, right in zip(attend_steps(backend, table, steps, window), want, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-9)
    assert backend.long == 2


@pytest.mark.parametrize("window", [None, 40])
def test_mixed_steps_equal_the_reference(window: int | None, seed: int) -> None:
    table = PageTable(4, 400, SHAPE.page_size, seed)
    steps = random_steps(random.Random(seed), 4, 400, blocks=(1, 1, 4, 128), lengths=(1, 2, 64))
    steps += [[causal(row, 0, 80 + row, FULL) for row in range(4)]]
    backend = Counted(computed_call)
    want = attend_steps(ReferenceBackend(SHAPE), table, steps, window)
    for left, right in zip(attend_steps(backend, table, steps, window), want, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-9)
    assert backend.long > 0 or window is not None


@pytest.mark.parametrize(
    ("spans", "window", "mask"),
    [
        ([causal(0, 0, 64), causal(1, 9, 10)], None, True),
        ([causal(0, 0, 64), causal(1, 9, 10)], 8, True),
        ([causal(0, 0, 63), causal(1, 9, 10)], None, None),  # too short to fill a tile
        ([Span(0, 0, 64, 90, 1, 0, 0)], None, None),  # keys behind its last query
        ([causal(0, 0, 64, FULL), causal(1, 0, 3, FULL)], None, False),
        ([causal(0, 0, 64, FULL)], 8, None),
        ([causal(0, 128, 256, 128), causal(1, 0, 128, 128)], None, False),
        ([causal(0, 0, 256, 128)], None, None),  # two blocks: the first must not see the second
        ([causal(0, 0, 64, FULL), causal(1, 5, 6)], None, False),  # one query sees all it has
        ([causal(0, 0, 64, FULL), causal(1, 5, 7)], None, None),
    ],
)
def test_what_flash_attention_gets(
    spans: list[Span], window: int | None, mask: bool | None, seed: int
) -> None:
    table, backend = PageTable(2, 256, SHAPE.page_size, seed), Counted(computed_call)
    plan = backend.plan(table.batch(spans), window=window)
    assert (plan.causal if isinstance(plan, FlashPlan) else None) == mask
    without_spans = backend.plan(table.batch(spans, on_host=False), window=window)
    assert not isinstance(without_spans, FlashPlan)


PROMPTS = [causal(0, 0, 90), causal(1, 0, 70), causal(2, 0, 128, 4), causal(3, 0, 65)]
BESIDE = {
    "behind": [causal(0, 90, 170), causal(3, 65, 66), causal(1, 70, 72)],
    "among": [causal(3, 65, 66), causal(0, 90, 170), causal(1, 70, 72)],
    "ahead": [causal(1, 70, 72), causal(3, 65, 66), causal(0, 90, 170)],
    "with a mask": [causal(0, 90, 170), Span(2, 128, 130, 132, 4, 0, 0), causal(1, 70, 71)],
}


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("name", BESIDE)
def test_few_queries_beside_prompts_go_to_the_other_backend(
    name: str, window: int | None, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """FlashAttention gets none that stand behind its own; their masks are no matter then."""
    monkeypatch.setattr(flash, "_WORTH_KEYS", 60)
    table, short = PageTable(4, 200, SHAPE.page_size, seed), Few(SHAPE)
    steps, sizes = [PROMPTS, BESIDE[name]], []

    def call(q: Any, cache: Any, plan: FlashPlan, scale: float) -> torch.Tensor:
        sizes.append(len(plan.batch.kv_lens))
        return computed_call(q, cache, plan, scale)

    stored = [*PROMPTS, causal(2, 128, 132, 4)]
    want = attend_steps(ReferenceBackend(SHAPE), table, [stored, *steps[1:]], window)
    got = attend_steps(Counted(call, short), table, [stored, *steps[1:]], window)
    for left, right in zip(got, want, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-9)
    assert sizes == [{"behind": 1, "among": 2, "ahead": 3, "with a mask": 1}[name]]
    short.forgets = True
    forgotten = attend_steps(Counted(call, short), table, [stored, *steps[1:]], window)[-1]
    assert forgotten.isnan().any() == (name != "ahead"), "the control"


def test_few_keys_are_not_worth_a_launch(seed: int) -> None:
    table, backend = PageTable(40, 1024, SHAPE.page_size, seed), Counted(computed_call, Few(SHAPE))
    prompt, rows = causal(0, 0, 80), [causal(row, 1023, 1024) for row in range(1, 33)]
    sizes = []
    for count in (31, 32):
        plan = backend.plan(table.batch([prompt, *rows[:count]]), window=None)
        assert isinstance(plan, FlashPlan)
        sizes.append((len(plan.batch.kv_lens), plan.few is None))
    assert sizes == [(32, True), (1, False)]


def test_a_step_with_few_queries_goes_on_where_it_breaks(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(flash, "_WORTH_KEYS", 1)

    def call(*args: Any) -> torch.Tensor:
        if backend.broken_from_here:
            raise RuntimeError("ptxas died")
        return computed_call(*args)

    table, backend = PageTable(2, 200, SHAPE.page_size, seed), Counted(call, Few(SHAPE))
    cache = backend.empty_cache(table.num_pages, table.device)
    plan = backend.plan(table.batch([causal(0, 0, 80), causal(1, 0, 1)]), window=None)
    q = torch.randn(81, SHAPE.num_heads, SHAPE.head_dim, dtype=torch.float64)
    want = backend.attend(q, cache=cache, plan=plan, scale=1.0)
    backend.broken_from_here = True
    torch.testing.assert_close(backend.attend(q, cache=cache, plan=plan, scale=1.0), want)


def test_one_warning_of_the_compiler_is_silenced(monkeypatch: pytest.MonkeyPatch) -> None:
    noise = "Argument aux_data (position 17) cannot be converted to a JitArgument: it is None"

    def varlen(*args: object, **named: object) -> torch.Tensor:
        for text in (noise, "Argument q (position 1) cannot be converted to a JitArgument"):
            warnings.warn(text, UserWarning, stacklevel=2)
        return torch.empty(0)

    batch = SimpleNamespace(cu_seqlens_q=None, kv_lens=None, page_table=None)
    plan: Any = FlashPlan(batch, None, True, batch)  # type: ignore[arg-type]
    empty: Any = SimpleNamespace(k=torch.empty(0, 16, 2, 8), v=None)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        call = stand_in(monkeypatch, load_flash4, "flash_attn.cute", flash_attn_varlen_func=varlen)
        call(torch.empty(0), empty, plan, 1.0)
    assert [str(one.message).split()[1] for one in heard] == ["q"]


def test_it_is_capturable_where_short_steps_are() -> None:
    short = ReferenceBackend(SHAPE)
    assert not FlashBackend(SHAPE, computed_call, short).capturable
    short.capturable = True
    assert FlashBackend(SHAPE, computed_call, short).capturable


def test_a_late_failure_costs_speed_and_one_warning(
    caplog: pytest.LogCaptureFixture, seed: int
) -> None:
    calls = []

    def call(*args: Any) -> torch.Tensor:
        calls.append(args)
        if len(calls) == 2:
            raise RuntimeError("ptxas died")
        return computed_call(*args)

    table, backend = PageTable(1, 400, SHAPE.page_size, seed), Counted(call)
    steps = [[causal(0, start, start + 80)] for start in range(0, 400, 80)]
    want = attend_steps(ReferenceBackend(SHAPE), table, steps, None)
    with caplog.at_level(logging.WARNING):
        got = attend_steps(backend, table, steps, None)
    for left, right in zip(got, want, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-9)
    assert len(calls) == backend.long == 2
    assert [record.message for record in caplog.records] == [
        "FlashAttention failed and is off from now on, prompts will be slower:"
        " RuntimeError: ptxas died"
    ]


def test_the_other_layers_of_the_step_in_which_it_broke(seed: int) -> None:
    def call(*args: Any) -> torch.Tensor:
        if backend.broken_from_here:
            raise RuntimeError("ptxas died")
        return computed_call(*args)

    table, backend = PageTable(1, 80, SHAPE.page_size, seed), Counted(call)
    cache = backend.empty_cache(table.num_pages, table.device)
    plan = backend.plan(table.batch([causal(0, 0, 80)]), window=None)
    q = torch.randn(80, SHAPE.num_heads, SHAPE.head_dim, dtype=torch.float64)
    want = backend.attend(q, cache=cache, plan=plan, scale=1.0)
    backend.broken_from_here = True
    for _ in range(3):
        torch.testing.assert_close(backend.attend(q, cache=cache, plan=plan, scale=1.0), want)


def test_a_failure_before_the_first_success_is_raised(seed: int) -> None:
    def call(*args: Any) -> torch.Tensor:
        raise RuntimeError("no cubin")

    table = PageTable(1, 80, SHAPE.page_size, seed)
    with pytest.raises(RuntimeError, match="no cubin"):
        attend_steps(Counted(call), table, [[causal(0, 0, 80)]], None)


def test_memory_that_runs_out_leaves_it_on(seed: int) -> None:
    """An engine that ends for want of memory says so, not that FlashAttention has failed."""

    def call(*args: Any) -> torch.Tensor:
        if backend.broken_from_here:
            raise torch.OutOfMemoryError("full")
        return computed_call(*args)

    table, backend = PageTable(1, 80, SHAPE.page_size, seed), Counted(call)
    steps = [[causal(0, 0, 80)]]
    want = attend_steps(backend, table, steps, None)
    backend.broken_from_here = True
    with pytest.raises(torch.OutOfMemoryError):
        attend_steps(backend, table, steps, None)
    backend.broken_from_here = False
    torch.testing.assert_close(attend_steps(backend, table, steps, None), want)
    assert backend.long == 3


def test_a_shifted_window_shows(seed: int) -> None:
    """Negative control: a library that sees one key more than asked differs."""

    def call(q: Any, cache: Any, plan: FlashPlan, scale: float) -> torch.Tensor:
        assert plan.window is not None
        return computed_call(q, cache, plan._replace(window=plan.window + 1), scale)

    table, steps = PageTable(1, 80, SHAPE.page_size, seed), [[causal(0, 0, 80)]]
    (want,) = attend_steps(ReferenceBackend(SHAPE), table, steps, 8)
    (got,) = attend_steps(Counted(call), table, steps, 8)
    assert (got - want).abs().max() > 1e-3

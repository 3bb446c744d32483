"""The kernels that choose a token of every row of logits, and those that judge how sure a choice
is. Eager is what PyTorch users write. It does not measure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch.nn import functional

from engine_service.kernels.candidates import Filters
from engine_service.kernels.confidence import confidence, confidence_ref
from engine_service.kernels.filters import draw_filtered_triton
from engine_service.kernels.head_confidence import head_confidence_triton
from engine_service.kernels.sampling import draw_tokens_triton
from engine_service.kernels.streams import Streams
from tidemill.bench.kernel_cases import VOCAB, Case, Make, normal

_TEMPERATURE, _TOP_K, _TOP_P = 0.6, 20, 0.95
"""What Qwen3 recommends."""
_PEAKED = 4.0
"""Random logits times this are about as far apart as those of a language model."""


def cases(dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    """All of them, one after the other, so that only one holds memory."""
    yield _confidence(2048, dtype, device)
    for rows in (32, 2048):
        yield _head_confidence(rows, 4096, dtype, device)
    yield _draw(256, dtype, device)
    for top_k, top_p in ((_TOP_K, _TOP_P), (0, _TOP_P)):
        for rows in (1, 32, 256):
            for scale in (1.0, _PEAKED):
                yield _draw_filtered(rows, top_k, top_p, scale, dtype, device)


def _confidence(rows: int, dtype: torch.dtype, device: torch.device) -> Case:
    def make(judge: Callable[[torch.Tensor], object]) -> Make:
        def inputs() -> Callable[[], object]:
            logits = normal(rows, VOCAB, dtype, device)
            return lambda: judge(logits)

        return inputs

    return Case(
        name="confidence",
        size=f"{rows} x {VOCAB}",
        moved=rows * VOCAB * dtype.itemsize,
        ours=make(confidence),
        eager=make(confidence_ref),
    )


def _head_confidence(rows: int, size: int, dtype: torch.dtype, device: torch.device) -> Case:
    def make(judge: Callable[[torch.Tensor, torch.Tensor], object]) -> Make:
        def inputs() -> Callable[[], object]:
            x, weight = (normal(count, size, dtype, device) for count in (rows, VOCAB))
            return lambda: judge(x, weight)

        return inputs

    return Case(
        name="head_confidence",
        size=f"{rows} rows, {size} to {VOCAB}",
        moved=(VOCAB + rows) * size * dtype.itemsize,
        flop=2 * rows * VOCAB * size,
        ours=make(head_confidence_triton),
        eager=make(lambda x, weight: confidence_ref(functional.linear(x, weight))),
    )


def _draw(rows: int, dtype: torch.dtype, device: torch.device) -> Case:
    """One token a row at a temperature; eager is softmax and multinomial."""

    def ours() -> Callable[[], object]:
        logits, streams = normal(rows, VOCAB, dtype, device), _streams(rows, device)
        return lambda: draw_tokens_triton(logits, streams, None)

    def eager() -> Callable[[], object]:
        logits = normal(rows, VOCAB, dtype, device)
        return lambda: (logits.float() / _TEMPERATURE).softmax(dim=-1).multinomial(1)

    return Case(
        name="draw_tokens",
        size=f"{rows} x {VOCAB}",
        moved=rows * VOCAB * dtype.itemsize,
        ours=ours,
        eager=eager,
        eager_capturable=False,
    )


def _draw_filtered(
    rows: int, top_k: int, top_p: float, scale: float, dtype: torch.dtype, device: torch.device
) -> Case:
    """The same of what top-k and top-p keep; eager sorts, as transformers' warpers do."""

    def ours() -> Callable[[], object]:
        logits = normal(rows, VOCAB, dtype, device) * scale
        count = torch.full((rows,), top_k, device=device)
        mass, no_bound = torch.full((rows,), top_p, device=device), torch.zeros(rows, device=device)
        streams, filters = _streams(rows, device), Filters(count, mass, no_bound)
        return lambda: draw_filtered_triton(logits, streams, filters, None)

    def eager() -> Callable[[], object]:
        logits = normal(rows, VOCAB, dtype, device) * scale
        return lambda: eager_draw_filtered(logits, top_k, top_p)

    kind = "peaked" if scale > 1 else "flat"
    return Case(
        name=f"draw_filtered {f'k{top_k} ' if top_k else ''}p{top_p}",
        size=f"{rows} x {VOCAB}, {kind}",
        moved=rows * VOCAB * dtype.itemsize,
        ours=ours,
        eager=eager,
        eager_capturable=False,
    )


def eager_draw_filtered(logits_NV: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """[N, 1] int64."""
    scores = logits_NV.float() / _TEMPERATURE
    if top_k:
        bound = scores.topk(top_k).values[:, -1:]
        scores = scores.masked_fill(scores < bound, float("-inf"))
    best, ids = scores.sort(dim=-1, descending=True)
    probs = best.softmax(dim=-1)
    probs = probs.masked_fill(probs.cumsum(dim=-1) - probs >= top_p, 0.0)
    return ids.gather(1, probs.multinomial(1))


def _streams(rows: int, device: torch.device) -> Streams:
    every = torch.arange(rows, device=device)
    heat = torch.full((rows,), _TEMPERATURE, device=device)
    return Streams(every, every, every, heat, every, 0)

"""How sure a row of logits is, in one pass: the likeliest id, its probability, entropy, margin.

It does not know temperatures, rows or what the numbers decide. Shape legend: N rows of logits, V
vocabulary, C tiles of a row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from engine_service.kernels.jit import jit, overlaps_launches, runs_triton, tl, triton
from engine_service.kernels.vocab_tiles import (
    TILE,
    distance_below,
    exp_below,
    load_tile,
    lowest_best,
)

_PARTS = 4


class Confidence(NamedTuple):
    """Of softmax(logits) without banned ids, each [N]; float32, or float64 for float64 logits."""

    token_ids: torch.Tensor
    """int64: the likeliest id, of equals the lowest."""
    probs: torch.Tensor
    """Its probability."""
    entropy: torch.Tensor
    """-sum p ln p, in nats."""
    margin: torch.Tensor
    """Its probability minus that of the second likeliest id."""
    logsumexp: torch.Tensor
    """ln sum exp(logits)."""


def confidence_ref(logits_NV: torch.Tensor, banned_ids: torch.Tensor | None = None) -> Confidence:
    """Everything from the softmax itself; V is at least 2."""
    wide = logits_NV if logits_NV.dtype is torch.float64 else logits_NV.float()
    if banned_ids is not None:
        wide = wide.index_fill(1, banned_ids, float("-inf"))
    probs = wide.softmax(dim=1)
    best = probs.topk(2, dim=1).values
    return Confidence(
        token_ids=wide.argmax(dim=1),
        probs=best[:, 0],
        entropy=-torch.xlogy(probs, probs).sum(dim=1),
        margin=best[:, 0] - best[:, 1],
        logsumexp=wide.logsumexp(dim=1),
    )


def confidence(logits_NV: torch.Tensor, banned_ids: torch.Tensor | None = None) -> Confidence:
    """`confidence_ref`; two launches on CUDA, where a NaN counts as -inf."""
    if runs_triton(logits_NV):
        return confidence_triton(logits_NV, banned_ids)
    return confidence_ref(logits_NV, banned_ids)


@jit
def _confidence_tiles_kernel(
    logits_ptr: tl.tensor,
    banned_ptr: tl.tensor,
    id_ptr: tl.tensor,
    part_ptr: tl.tensor,
    stride: tl.tensor,
    vocab: tl.tensor,
    num_parts: tl.tensor,
    NUM_BANNED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    n = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * BLOCK
    line_ptr = logits_ptr + n * stride
    x = load_tile(line_ptr, start, vocab, banned_ptr, NUM_BANNED, BLOCK)
    # The maximum of eight neighbours is one instruction a logit; which of the eight it was, and
    # what came second, is then asked of one group only.
    groups = tl.max(tl.reshape(x, (BLOCK // 8, 8)), axis=1)
    numbers = tl.arange(0, BLOCK // 8)
    best, group = lowest_best(groups, numbers, BLOCK // 8)
    first = start + group * 8
    few = load_tile(line_ptr, first, vocab, banned_ptr, NUM_BANNED, 8)
    _, token = lowest_best(few, first + tl.arange(0, 8), vocab)
    second = tl.maximum(
        tl.max(tl.where(numbers == group, float("-inf"), groups), axis=0),
        tl.max(tl.where(first + tl.arange(0, 8) == token, float("-inf"), few), axis=0),
    )
    weight = exp_below(x, best)
    # The sum of weight * (x - best) is what the entropy needs besides the sum of weights.
    below = distance_below(x, best)
    part = n * tl.num_programs(1) + tl.program_id(1)
    tl.store(id_ptr + part, token)
    tl.store(part_ptr + part, best)
    tl.store(part_ptr + num_parts + part, second)
    tl.store(part_ptr + 2 * num_parts + part, tl.sum(weight, axis=0))
    tl.store(part_ptr + 3 * num_parts + part, tl.sum(weight * below, axis=0))


@jit
def _confidence_join_kernel(
    id_ptr: tl.tensor,
    part_ptr: tl.tensor,
    token_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_tiles: tl.tensor,
    num_parts: tl.tensor,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    n = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, BLOCK)
    inside = tile < num_tiles
    part = n * num_tiles + tile
    ids = tl.load(id_ptr + part, mask=inside, other=2147483647)
    best = tl.load(part_ptr + part, mask=inside, other=float("-inf"))
    second = tl.load(part_ptr + num_parts + part, mask=inside, other=float("-inf"))
    sums = tl.load(part_ptr + 2 * num_parts + part, mask=inside, other=0.0)
    products = tl.load(part_ptr + 3 * num_parts + part, mask=inside, other=0.0)
    top = tl.max(best, axis=0)
    token = tl.min(tl.where(best == top, ids, 2147483647), axis=0)
    second = tl.max(tl.where(ids == token, second, best), axis=0)
    below = distance_below(best, top)
    weight = exp_below(best, top)
    # The best logit alone gives 1, except in a row that allows nothing.
    total = tl.maximum(tl.sum(weight * sums, axis=0), 1.0)
    product = tl.sum(weight * (products + below * sums), axis=0)
    tl.store(token_ptr + n, token.to(tl.int64))
    num_rows = tl.num_programs(0)
    tl.store(out_ptr + n, 1.0 / total)
    tl.store(out_ptr + num_rows + n, tl.log(total) - product / total)
    tl.store(out_ptr + 2 * num_rows + n, (1.0 - exp_below(second, top)) / total)
    tl.store(out_ptr + 3 * num_rows + n, top + tl.log(total))


def confidence_triton(
    logits_NV: torch.Tensor, banned_ids: torch.Tensor | None = None
) -> Confidence:
    """`confidence_ref` in two launches, by the online softmax (Milakov and Gimelshein 2018,
    arXiv 1805.02867) over tiles; rows are contiguous, float64 is not there."""
    num_rows, vocab = logits_NV.shape
    device = logits_NV.device
    num_tiles = triton.cdiv(vocab, TILE)
    ids = torch.empty(num_rows, num_tiles, dtype=torch.int32, device=device)
    parts = torch.empty(_PARTS, num_rows, num_tiles, dtype=torch.float32, device=device)
    overlap = overlaps_launches(device)
    _confidence_tiles_kernel[(num_rows, num_tiles)](
        logits_NV,
        banned_ids,
        ids,
        parts,
        logits_NV.stride(0),
        vocab,
        ids.numel(),
        NUM_BANNED=0 if banned_ids is None else banned_ids.numel(),
        BLOCK=TILE,
        PDL=overlap,
        num_warps=4,
        launch_pdl=overlap,
    )
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=device)
    out = torch.empty(4, num_rows, dtype=torch.float32, device=device)
    _confidence_join_kernel[(num_rows,)](
        ids,
        parts,
        token_ids,
        out,
        num_tiles,
        ids.numel(),
        BLOCK=triton.next_power_of_2(num_tiles),
        PDL=overlap,
        num_warps=1,
        launch_pdl=overlap,
    )
    return Confidence(token_ids, *out)

"""Forbids ids by a bitmask, as grammars give it: one bit an id. It does not know grammars.

Shape legend: N rows of logits, V vocabulary, M bitmasks, W words of 32 bits.
"""

from __future__ import annotations

import torch

from engine_service.kernels.jit import jit, overlaps_launches, runs_triton, tl, triton
from engine_service.kernels.vocab_tiles import TILE


def apply_bitmask_ref(
    logits_NV: torch.Tensor, bitmask_MW: torch.Tensor, rows_M: torch.Tensor | None = None
) -> None:
    """logits[rows[m], v] = -inf where bit v % 32 of word v // 32 of bitmask[m] is 0, in place.

    Bitmasks are int32, `rows` int64; without rows, M is N. Ids without a word are forbidden. A
    negative row is left out, so that a fixed number of bitmasks can serve fewer rows; no row comes
    twice.
    """
    vocab = logits_NV.shape[1]
    bits = bitmask_MW[:, :, None] >> torch.arange(32, device=bitmask_MW.device, dtype=torch.int32)
    held = (bits & 1).bool().flatten(1)[:, :vocab]
    allowed = held.new_zeros(len(held), vocab)
    allowed[:, : held.shape[1]] = held
    if rows_M is None:
        logits_NV.masked_fill_(~allowed, float("-inf"))
        return
    present = rows_M >= 0
    named = rows_M[present]
    logits_NV[named] = logits_NV[named].masked_fill(~allowed[present], float("-inf"))


def apply_bitmask(
    logits_NV: torch.Tensor, bitmask_MW: torch.Tensor, rows_M: torch.Tensor | None = None
) -> None:
    """`apply_bitmask_ref`; one launch on CUDA."""
    apply = apply_bitmask_triton if runs_triton(logits_NV) else apply_bitmask_ref
    apply(logits_NV, bitmask_MW, rows_M)


@jit
def _bitmask_kernel(
    logits_ptr: tl.tensor,
    bitmask_ptr: tl.tensor,
    row_ptr: tl.tensor,
    stride: tl.tensor,
    bitmask_stride: tl.tensor,
    vocab: tl.tensor,
    num_words: tl.tensor,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    m = tl.program_id(0).to(tl.int64)
    row = m if row_ptr is None else tl.load(row_ptr + m)
    if row >= 0:
        ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        place = ids // 32
        word = tl.load(bitmask_ptr + m * bitmask_stride + place, mask=place < num_words, other=0)
        forbidden = ((word >> (ids % 32)) & 1) == 0
        never = tl.full([BLOCK], float("-inf"), tl.float32)
        tl.store(logits_ptr + row * stride + ids, never, mask=forbidden & (ids < vocab))


def apply_bitmask_triton(
    logits_NV: torch.Tensor, bitmask_MW: torch.Tensor, rows_M: torch.Tensor | None = None
) -> None:
    """`apply_bitmask_ref` in one launch, which only writes; rows are contiguous."""
    vocab, (num_masks, num_words) = logits_NV.shape[1], bitmask_MW.shape
    overlap = overlaps_launches(logits_NV.device)
    _bitmask_kernel[(num_masks, triton.cdiv(vocab, TILE))](
        logits_NV,
        bitmask_MW,
        rows_M,
        logits_NV.stride(0),
        bitmask_MW.stride(0),
        vocab,
        num_words,
        BLOCK=TILE,
        PDL=overlap,
        num_warps=4,
        launch_pdl=overlap,
    )

"""Scores of tokens after penalties, biases and minimum length, in one float32 copy of the logits.

It does not know requests or how a token is chosen. Shape legend: N rows of logits, V vocabulary,
R lines of the tables, L their width, E slots.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from engine_service.kernels.jit import jit, overlaps_launches, tl, triton
from engine_service.kernels.vocab_tiles import TILE, load_tile

_HISTORY = 1024


class Penalties(NamedTuple):
    """Lines of the tables: what stands in a row, and what that costs."""

    tokens: torch.Tensor
    """[R, L] int64."""
    prompt_lens: torch.Tensor
    """[R] int64."""
    repetition: torch.Tensor
    """[R] float32; 1 is off."""
    presence: torch.Tensor
    """[R] float32; 0 is off."""
    frequency: torch.Tensor
    """[R] float32; 0 is off."""


class Slots(NamedTuple):
    """Lines of the tables: biases, and ids that are forbidden at first."""

    bias_ids: torch.Tensor
    """[R, E] int64, -1 behind the last one."""
    bias_values: torch.Tensor
    """[R, E] float32."""
    suppress_ids: torch.Tensor
    """[R, E] int64, -1 behind the last one."""
    min_tokens: torch.Tensor
    """[R] int64."""
    prompt_lens: torch.Tensor
    """[R] int64."""


@jit
def _count_kernel(
    token_ptr: tl.tensor,
    row_ptr: tl.tensor,
    position_ptr: tl.tensor,
    prompt_len_ptr: tl.tensor,
    repetition_ptr: tl.tensor,
    presence_ptr: tl.tensor,
    frequency_ptr: tl.tensor,
    mark_ptr: tl.tensor,
    token_stride: tl.tensor,
    vocab: tl.tensor,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    n = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * BLOCK
    row = tl.load(row_ptr + n)
    position = tl.load(position_ptr + n)
    repetition = tl.load(repetition_ptr + row)
    presence, frequency = tl.load(presence_ptr + row), tl.load(frequency_ptr + row)
    active = (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0)
    if active & (start < position):
        place = start + tl.arange(0, BLOCK)
        before = place < position
        token = tl.load(token_ptr + row * token_stride + place, mask=before, other=0)
        marks = mark_ptr + n * vocab + token
        in_output = before & (place >= tl.load(prompt_len_ptr + row))
        tl.atomic_add(marks, 2, mask=in_output, sem="relaxed")
        tl.atomic_or(marks, 1, mask=before & ~in_output, sem="relaxed")


@jit
def _penalize_kernel(
    logits_ptr: tl.tensor,
    row_ptr: tl.tensor,
    repetition_ptr: tl.tensor,
    presence_ptr: tl.tensor,
    frequency_ptr: tl.tensor,
    banned_ptr: tl.tensor,
    mark_ptr: tl.tensor,
    score_ptr: tl.tensor,
    stride: tl.tensor,
    vocab: tl.tensor,
    NUM_BANNED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    n = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * BLOCK
    x = load_tile(logits_ptr + n * stride, start, vocab, banned_ptr, NUM_BANNED, BLOCK)
    ids = start + tl.arange(0, BLOCK)
    if mark_ptr is not None:
        row = tl.load(row_ptr + n)
        repetition = tl.load(repetition_ptr + row)
        marks = tl.load(mark_ptr + n * vocab + ids, mask=ids < vocab, other=0)
        penalized = tl.where(x > 0.0, tl.div_rn(x, repetition), x * repetition)
        x = tl.where(marks > 0, penalized, x)
        count = marks >> 1
        x -= tl.load(frequency_ptr + row) * count.to(tl.float32)
        x -= tl.load(presence_ptr + row) * (count > 0).to(tl.float32)
    tl.store(score_ptr + n * vocab + ids, x, mask=ids < vocab)


@jit
def _slots_kernel(
    score_ptr: tl.tensor,
    row_ptr: tl.tensor,
    position_ptr: tl.tensor,
    prompt_len_ptr: tl.tensor,
    min_tokens_ptr: tl.tensor,
    bias_id_ptr: tl.tensor,
    bias_value_ptr: tl.tensor,
    suppress_id_ptr: tl.tensor,
    bias_width: tl.tensor,
    suppress_width: tl.tensor,
    vocab: tl.tensor,
    BIAS_BLOCK: tl.constexpr,
    SUPPRESS_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    n = tl.program_id(0).to(tl.int64)
    row = tl.load(row_ptr + n)
    line_ptr = score_ptr + n * vocab
    slot = tl.arange(0, BIAS_BLOCK)
    ids = tl.load(bias_id_ptr + row * bias_width + slot, mask=slot < bias_width, other=-1)
    value = tl.load(bias_value_ptr + row * bias_width + slot, mask=slot < bias_width, other=0.0)
    # Additions on both sides: whichever comes first, -inf stays -inf.
    tl.atomic_add(line_ptr + ids, value, mask=ids >= 0, sem="relaxed")
    length = tl.load(position_ptr + n) - tl.load(prompt_len_ptr + row)
    if length < tl.load(min_tokens_ptr + row):
        slot = tl.arange(0, SUPPRESS_BLOCK)
        inside = slot < suppress_width
        ids = tl.load(suppress_id_ptr + row * suppress_width + slot, mask=inside, other=-1)
        never = tl.full([SUPPRESS_BLOCK], float("-inf"), tl.float32)
        tl.atomic_add(line_ptr + ids, never, mask=ids >= 0, sem="relaxed")


def adjusted_scores_triton(
    logits_NV: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    banned_ids: torch.Tensor | None,
    *,
    penalties: Penalties | None,
    slots: Slots | None,
    max_position: int,
) -> torch.Tensor:
    """[N, V] float32: logits with banned ids at -inf, then penalties, biases and minimum length.

    Repetition over prompt and output (arXiv 1909.05858), presence and frequency over output; what
    stands at or behind positions[n] does not count, and `max_position` bounds them. Definitions
    and the plain formula are in sampling/processors.py. None leaves a part out.
    """
    num_rows, vocab = logits_NV.shape
    scores = torch.empty(num_rows, vocab, dtype=torch.float32, device=logits_NV.device)
    overlap = overlaps_launches(logits_NV.device)
    marks = None
    if penalties is not None:
        marks = _marks(rows, positions, penalties, vocab, max_position)
    prices = (None,) * 3 if penalties is None else penalties[2:]
    _penalize_kernel[(num_rows, triton.cdiv(vocab, TILE))](
        logits_NV,
        rows,
        *prices,
        banned_ids,
        marks,
        scores,
        logits_NV.stride(0),
        vocab,
        NUM_BANNED=0 if banned_ids is None else banned_ids.numel(),
        BLOCK=TILE,
        PDL=overlap,
        num_warps=8,
        enable_fp_fusion=False,
        launch_pdl=overlap,
    )
    if slots is not None:
        _add_slots(scores, rows, positions, slots)
    return scores


def _marks(
    rows: torch.Tensor,
    positions: torch.Tensor,
    penalties: Penalties,
    vocab: int,
    max_position: int,
) -> torch.Tensor:
    """[N, V] int32: bit 0 is set for ids of the prompt; above it, how often the output has them."""
    device = positions.device
    marks = torch.zeros(len(rows), vocab, dtype=torch.int32, device=device)
    overlap = overlaps_launches(device)
    _count_kernel[(len(rows), max(1, triton.cdiv(max_position, _HISTORY)))](
        penalties.tokens,
        rows,
        positions,
        *penalties[1:],
        marks,
        penalties.tokens.stride(0),
        vocab,
        BLOCK=_HISTORY,
        PDL=overlap,
        num_warps=4,
        launch_pdl=overlap,
    )
    return marks


def _add_slots(
    scores: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, slots: Slots
) -> None:
    bias_width, suppress_width = slots.bias_ids.shape[1], slots.suppress_ids.shape[1]
    overlap = overlaps_launches(scores.device)
    _slots_kernel[(len(rows),)](
        scores,
        rows,
        positions,
        slots.prompt_lens,
        slots.min_tokens,
        slots.bias_ids,
        slots.bias_values,
        slots.suppress_ids,
        bias_width,
        suppress_width,
        scores.shape[1],
        BIAS_BLOCK=triton.next_power_of_2(bias_width),
        SUPPRESS_BLOCK=triton.next_power_of_2(suppress_width),
        PDL=overlap,
        num_warps=1,
        launch_pdl=overlap,
    )

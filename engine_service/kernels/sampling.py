"""Draws one token for every row of logits in two launches: Gumbel-max, or argmax at temperature 0.

It does not know filters, penalties or strategies. The plain formula is in sampling/sampler.py.
Shape legend: N rows of logits, V vocabulary, C tiles of a row, R lines of the tables.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from engine_service.kernels.candidates import FEW, GROUP
from engine_service.kernels.jit import INTERPRETED, jit, overlaps_launches, tl, triton
from engine_service.kernels.streams import Streams
from engine_service.kernels.vocab_share import VocabShare
from engine_service.kernels.vocab_tiles import (
    TILE,
    draw_key,
    gumbel_noise,
    load_tile,
    lowest_best,
)


class Leaders(NamedTuple):
    """For rows of few candidates: what their draw (kernels/candidates.py) starts from."""

    top_k: torch.Tensor
    """[R] int64; 0 is off."""
    best: torch.Tensor
    """[N, G] float32: the best score of every 32 ids is written here."""


@jit
def _draw_tiles_kernel(
    logits_ptr: tl.tensor,
    row_ptr: tl.tensor,
    position_ptr: tl.tensor,
    draw_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    seed_ptr: tl.tensor,
    banned_ptr: tl.tensor,
    id_ptr: tl.tensor,
    score_ptr: tl.tensor,
    top_k_ptr: tl.tensor,
    leader_ptr: tl.tensor,
    stride: tl.tensor,
    first: tl.tensor,
    vocab: tl.tensor,
    PURPOSE: tl.constexpr,
    NUM_BANNED: tl.constexpr,
    HARDWARE_LOG: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    FEW: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    n = tl.program_id(0).to(tl.int64)
    start = first + tl.program_id(1) * BLOCK
    row = tl.load(row_ptr + n)
    temperature = tl.load(temperature_ptr + row)
    # Ids are those of the whole vocabulary: the line begins `first` logits ahead of the columns.
    x = load_tile(logits_ptr + (n * stride - first), start, vocab, banned_ptr, NUM_BANNED, BLOCK)
    ids, part = start + tl.arange(0, BLOCK), n * tl.num_programs(1) + tl.program_id(1)
    score = x
    is_drawn_here = True
    # A branch per program: one captured graph serves greedy rows and sampled ones.
    if temperature > 0.0:
        score = x * tl.div_rn(1.0, temperature)
        if GROUP:
            top_k = tl.load(top_k_ptr + row)
            is_drawn_here = (top_k == 0) | (top_k > FEW)
            if not is_drawn_here:
                _store_leaders(leader_ptr + part * (BLOCK // GROUP), score, BLOCK // GROUP, GROUP)
        if is_drawn_here:
            position, draw = tl.load(position_ptr + n), tl.load(draw_ptr + n)
            key = draw_key(tl.load(seed_ptr + row), position, draw, PURPOSE)
            score += gumbel_noise(ids, key, HARDWARE_LOG)
    best, token = lowest_best(score, ids, vocab)
    tl.store(score_ptr + part, best)
    tl.store(id_ptr + part, tl.where(is_drawn_here, token, -1))


@jit
def _store_leaders(
    leader_ptr: tl.tensor, score: tl.tensor, COUNT: tl.constexpr, GROUP: tl.constexpr
) -> None:
    """The best score of every group; NaN is none."""
    groups = tl.reshape(tl.where(score == score, score, float("-inf")), (COUNT, GROUP))
    tl.store(leader_ptr + tl.arange(0, COUNT), tl.max(groups, axis=1))


@jit
def _join_tiles_kernel(
    id_ptr: tl.tensor,
    score_ptr: tl.tensor,
    token_ptr: tl.tensor,
    num_tiles: tl.tensor,
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
    best = tl.load(score_ptr + part, mask=inside, other=float("-inf"))
    ids = tl.load(id_ptr + part, mask=inside, other=2147483647)
    token = tl.min(tl.where(best == tl.max(best, axis=0), ids, 2147483647), axis=0)
    tl.store(token_ptr + n, token.to(tl.int64))


def draw_tokens_triton(
    logits_NV: torch.Tensor,
    streams: Streams,
    banned_ids: torch.Tensor | None,
    share: VocabShare | None = None,
    leaders: Leaders | None = None,
) -> torch.Tensor:
    """[N] int64 argmax of logits / temperature + Gumbel noise, of equals the lowest id; never a
    banned one. Rows of `leaders` whose top-k is small get these, and no token but -1.

    `share`: which ids the columns are of; the best of each tile is exchanged with other ranks.
    `logits` are float32, bfloat16 or float16 with contiguous rows; `banned_ids` [few] int64. A NaN
    never wins; a row of nothing else gets an id in range.
    """
    num_rows, width = logits_NV.shape
    first, count = (0, width) if share is None else share[:2]
    num_tiles = triton.cdiv(width, TILE)
    tiles = torch.empty(2 * num_rows, num_tiles, dtype=torch.int32, device=logits_NV.device)
    ids, scores = tiles[:num_rows], tiles[num_rows:].view(torch.float32)
    overlap = overlaps_launches(logits_NV.device)
    _draw_tiles_kernel[(num_rows, num_tiles)](
        logits_NV,
        *streams[:5],
        banned_ids,
        ids,
        scores,
        *(leaders or (None, None)),
        logits_NV.stride(0),
        first,
        first + count,
        PURPOSE=int(streams.purpose),
        NUM_BANNED=0 if banned_ids is None else banned_ids.numel(),
        HARDWARE_LOG=not INTERPRETED,
        BLOCK=TILE,
        GROUP=0 if leaders is None else GROUP,
        FEW=FEW,
        PDL=overlap,
        num_warps=4,
        # Score and noise are rounded one by one, as in the plain formula.
        enable_fp_fusion=False,
        launch_pdl=overlap,
    )
    return _join_tiles(tiles if share is None else share.join(tiles))


def empty_leaders(logits_NV: torch.Tensor, top_k: torch.Tensor) -> Leaders:
    """Leaders to be written, those of ids behind V included."""
    num_rows, width = logits_NV.shape
    count = triton.cdiv(width, TILE) * (TILE // GROUP)
    return Leaders(top_k, torch.empty(num_rows, count, device=logits_NV.device))


def _join_tiles(tiles: torch.Tensor) -> torch.Tensor:
    """[N] int64 id of the best tile, of [2 N, C] ids above scores."""
    num_rows, num_tiles = tiles.shape[0] // 2, tiles.shape[1]
    ids, scores = tiles[:num_rows], tiles[num_rows:].view(torch.float32)
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=tiles.device)
    overlap = overlaps_launches(tiles.device)
    _join_tiles_kernel[(num_rows,)](
        ids,
        scores,
        token_ids,
        num_tiles,
        BLOCK=triton.next_power_of_2(num_tiles),
        PDL=overlap,
        num_warps=1,
        launch_pdl=overlap,
    )
    return token_ids

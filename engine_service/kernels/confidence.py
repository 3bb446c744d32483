"""How sure rows of logits are, in one pass: the chosen id, its probability, entropy, margin.

Logits may come whole or in pieces of the vocabulary (kernels/head_confidence.py). It does not know
temperatures or what the numbers decide. Shape legend: N rows of logits, V vocabulary, P ids of a
piece, C tiles of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from engine_service.kernels.jit import INTERPRETED, jit, overlaps_launches, runs_triton, tl, triton
from engine_service.kernels.streams import Streams
from engine_service.kernels.vocab_share import VocabShare
from engine_service.kernels.vocab_tiles import (
    TILE,
    distance_below,
    draw_key,
    exp_below,
    gumbel_noise,
    load_tile,
    lowest_best,
)

PIECE = 8 * TILE
"""Ids of a piece where plain torch computes. It is the same for any number of rows, so a row's
numbers do not depend on how many others share its step."""
_PARTS = 6
_LEAST = -80.0
"""Differences of logits below it count as it: exp of them adds nothing."""

Rescore = Callable[[torch.Tensor, int], torch.Tensor]
"""(logits [N, P], id of the first column) to the scores [N, P] that choose."""


class Confidence(NamedTuple):
    """Of softmax(logits) without banned ids, each [N]; float32, or float64 for float64 logits."""

    token_ids: torch.Tensor
    """int64: the id of the best score, of equals the lowest; scores are the logits, or logits with
    noise where a token is drawn."""
    probs: torch.Tensor
    """Its probability."""
    entropy: torch.Tensor
    """-sum p ln p, in nats."""
    margin: torch.Tensor
    """Probability of the likeliest id minus that of the second likeliest."""


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
    )


def confidence(logits_NV: torch.Tensor, banned_ids: torch.Tensor | None = None) -> Confidence:
    """`confidence_ref`; two launches on CUDA, where a NaN counts as -inf."""
    if runs_triton(logits_NV):
        return confidence_triton(logits_NV, banned_ids)
    return confidence_of_pieces(logits_NV.split(PIECE, dim=1), banned_ids)


class _Part(NamedTuple):
    """What is known of the ids seen so far, each [N]."""

    token_ids: torch.Tensor
    score: torch.Tensor
    """Of the chosen id."""
    chosen: torch.Tensor
    """Its logit."""
    best: torch.Tensor
    """Finite also where nothing is allowed."""
    second: torch.Tensor
    total: torch.Tensor
    """sum exp(x - best)."""
    product: torch.Tensor
    """sum exp(x - best) (x - best): what the entropy needs besides the sum."""


def confidence_of_pieces(
    pieces: Iterable[torch.Tensor],
    banned_ids: torch.Tensor | None = None,
    rescore: Rescore | None = None,
) -> Confidence:
    """`confidence_ref` of logits [N, P] piece after piece of the vocabulary, in plain torch.

    Online softmax (Milakov and Gimelshein 2018, arXiv 1805.02867): only one piece has to exist at a
    time, unless the caller keeps them. Without `rescore` the likeliest id is chosen.
    """
    seen: _Part | None = None
    first = 0
    for piece in pieces:
        part = _look_at(piece, first, banned_ids, rescore)
        seen = part if seen is None else _join(seen, part)
        first += piece.shape[1]
        # The loop's own reference would keep the piece while the next one is made.
        del piece
    assert seen is not None, "no logits"
    # The best logit alone gives 1, except in a row that allows nothing.
    total = seen.total.clamp(min=1)
    likeliest = total.reciprocal()
    return Confidence(
        token_ids=seen.token_ids,
        probs=likeliest if rescore is None else _below(seen.chosen, seen.best).exp() * likeliest,
        entropy=total.log() - seen.product * likeliest,
        margin=-_below(seen.second, seen.best).expm1() * likeliest,
    )


def _look_at(
    piece: torch.Tensor, first: int, banned_ids: torch.Tensor | None, rescore: Rescore | None
) -> _Part:
    x = piece if piece.dtype is torch.float64 else piece.float()
    if banned_ids is not None:
        ids = torch.arange(first, first + x.shape[1], device=x.device)
        x = x.masked_fill((ids[:, None] == banned_ids).any(dim=1), float("-inf"))
    score, place = x.max(dim=1)
    second = x.scatter(1, place[:, None], float("-inf")).amax(dim=1)
    best = chosen = score.clamp(min=torch.finfo(x.dtype).min)
    if rescore is not None:
        score, place = rescore(x, first).max(dim=1)
        chosen = x.gather(1, place[:, None])[:, 0]
    below = _below(x, best[:, None])
    weight = below.exp()
    total, product = weight.sum(dim=1), below.mul_(weight).sum(dim=1)
    return _Part(place + first, score, chosen, best, second, total, product)


def _join(a: _Part, b: _Part) -> _Part:
    """Of equal scores that of `a`, whose ids are lower."""
    b_wins = b.score > a.score
    best = torch.maximum(a.best, b.best)
    down_a, down_b = _below(a.best, best), _below(b.best, best)
    weight_a, weight_b = down_a.exp(), down_b.exp()
    product_a, product_b = (
        weight * (part.product + down * part.total)
        for part, down, weight in ((a, down_a, weight_a), (b, down_b, weight_b))
    )
    return _Part(
        token_ids=torch.where(b_wins, b.token_ids, a.token_ids),
        score=torch.where(b_wins, b.score, a.score),
        chosen=torch.where(b_wins, b.chosen, a.chosen),
        best=best,
        second=torch.maximum(torch.minimum(a.best, b.best), torch.maximum(a.second, b.second)),
        total=weight_a * a.total + weight_b * b.total,
        product=product_a + product_b,
    )


def _below(x: torch.Tensor, top: torch.Tensor) -> torch.Tensor:
    """x - top for x <= top, a finite one."""
    return (x - top).clamp_(min=_LEAST)


@jit
def _best_two(
    line_ptr: tl.tensor,
    x: tl.tensor,
    start: tl.tensor,
    vocab: tl.tensor,
    banned_ptr: tl.tensor,
    NUM_BANNED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """(best, second best, lowest id of the best) of a tile that starts at `start` and holds `x`."""
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
    return best, second, token


@jit
def _tiles_kernel(
    piece_ptr: tl.tensor,
    row_ptr: tl.tensor,
    position_ptr: tl.tensor,
    draw_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    seed_ptr: tl.tensor,
    banned_ptr: tl.tensor,
    id_ptr: tl.tensor,
    part_ptr: tl.tensor,
    stride: tl.tensor,
    first: tl.tensor,
    origin: tl.tensor,
    vocab: tl.tensor,
    num_tiles: tl.tensor,
    num_parts: tl.tensor,
    PURPOSE: tl.constexpr,
    NUM_BANNED: tl.constexpr,
    DRAWS: tl.constexpr,
    HARDWARE_LOG: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    n = tl.program_id(0).to(tl.int64)
    start = first + tl.program_id(1) * BLOCK
    # Ids are those of the vocabulary: the line begins `first` logits ahead of the piece.
    line_ptr = piece_ptr + (n * stride - first)
    x = load_tile(line_ptr, start, vocab, banned_ptr, NUM_BANNED, BLOCK)
    best, second, token = _best_two(line_ptr, x, start, vocab, banned_ptr, NUM_BANNED, BLOCK)
    score, chosen = best, best
    if DRAWS:
        row = tl.load(row_ptr + n)
        temperature = tl.load(temperature_ptr + row)
        # A branch per program: one captured graph serves greedy rows and sampled ones.
        if temperature > 0.0:
            position, draw = tl.load(position_ptr + n), tl.load(draw_ptr + n)
            key = draw_key(tl.load(seed_ptr + row), position, draw, PURPOSE)
            ids = start + tl.arange(0, BLOCK)
            noisy = x * tl.div_rn(1.0, temperature) + gumbel_noise(ids, key, HARDWARE_LOG)
            score, token = lowest_best(noisy, ids, vocab)
            # Where nothing is allowed the id that wins may be banned, or outside of tile and piece.
            is_here = (token >= start) & (token < start + BLOCK)
            own = tl.load(line_ptr + token, mask=is_here, other=float("-inf"))
            chosen = tl.minimum(own.to(tl.float32), best)
    part = n * num_tiles + (start - origin) // BLOCK
    tl.store(id_ptr + part, token)
    _store_part(part_ptr + part, num_parts, x, score, chosen, best, second)


@jit
def _store_part(
    place_ptr: tl.tensor,
    num_parts: tl.tensor,
    x: tl.tensor,
    score: tl.tensor,
    chosen: tl.tensor,
    best: tl.tensor,
    second: tl.tensor,
) -> None:
    weight = exp_below(x, best)
    # The sum of weight * (x - best) is what the entropy needs besides the sum of weights.
    below = distance_below(x, best)
    tl.store(place_ptr, score)
    tl.store(place_ptr + num_parts, chosen)
    tl.store(place_ptr + 2 * num_parts, best)
    tl.store(place_ptr + 3 * num_parts, second)
    tl.store(place_ptr + 4 * num_parts, tl.sum(weight, axis=0))
    tl.store(place_ptr + 5 * num_parts, tl.sum(weight * below, axis=0))


@jit
def _join_kernel(
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
    score = tl.load(part_ptr + part, mask=inside, other=float("-inf"))
    chosen = tl.load(part_ptr + num_parts + part, mask=inside, other=float("-inf"))
    best = tl.load(part_ptr + 2 * num_parts + part, mask=inside, other=float("-inf"))
    second = tl.load(part_ptr + 3 * num_parts + part, mask=inside, other=float("-inf"))
    sums = tl.load(part_ptr + 4 * num_parts + part, mask=inside, other=0.0)
    products = tl.load(part_ptr + 5 * num_parts + part, mask=inside, other=0.0)
    token = tl.min(tl.where(score == tl.max(score, axis=0), ids, 2147483647), axis=0)
    logit = tl.max(tl.where(ids == token, chosen, float("-inf")), axis=0)
    top = tl.max(best, axis=0)
    home = tl.min(tl.where(best == top, tile, BLOCK), axis=0)
    second = tl.max(tl.where(tile == home, second, best), axis=0)
    below = distance_below(best, top)
    weight = exp_below(best, top)
    # The best logit alone gives 1, except in a row that allows nothing.
    total = tl.maximum(tl.sum(weight * sums, axis=0), 1.0)
    product = tl.sum(weight * (products + below * sums), axis=0)
    tl.store(token_ptr + n, token.to(tl.int64))
    num_rows = tl.num_programs(0)
    tl.store(out_ptr + n, exp_below(logit, top) / total)
    tl.store(out_ptr + num_rows + n, tl.log(total) - product / total)
    tl.store(out_ptr + 2 * num_rows + n, (1.0 - exp_below(second, top)) / total)


class TileParts:
    """The kernels' `confidence_of_pieces`: a launch for every piece and one for the result.

    The parts are those of tiles, whatever the pieces are: numbers do not depend on their width,
    nor, where the vocabulary is a multiple of 16, do their last bits. float64 is not there.
    """

    def __init__(
        self, num_rows: int, width: int, device: torch.device, share: VocabShare | None = None
    ) -> None:
        """`width` logits a row: the whole vocabulary's, or those of a share of it."""
        self._share = share
        self._first, count = (0, width) if share is None else share[:2]
        self._stop, self._num_rows = self._first + count, num_rows
        shape = ((1 + _PARTS) * num_rows, triton.cdiv(width, TILE))
        self._tiles = torch.empty(shape, dtype=torch.int32, device=device)
        self._overlap = overlaps_launches(device)

    def add(
        self,
        piece: torch.Tensor,
        first: int,
        banned_ids: torch.Tensor | None,
        streams: Streams | None = None,
    ) -> None:
        """Logits [N, P] of the columns from `first` on, a multiple of TILE; P is one too, but in
        the last piece. Rows are contiguous. `streams`: rows of a temperature above 0 are drawn."""
        num_rows, width = piece.shape
        ids, parts = self._split(self._tiles)
        _tiles_kernel[(num_rows, triton.cdiv(width, TILE))](
            piece,
            *(streams[:5] if streams is not None else (None,) * 5),
            banned_ids,
            ids,
            parts,
            piece.stride(0),
            self._first + first,
            self._first,
            self._stop,
            ids.shape[1],
            ids.numel(),
            PURPOSE=int(streams.purpose) if streams is not None else 0,
            NUM_BANNED=0 if banned_ids is None else banned_ids.numel(),
            DRAWS=streams is not None,
            HARDWARE_LOG=not INTERPRETED,
            BLOCK=TILE,
            PDL=self._overlap,
            num_warps=4,
            # Score and noise are rounded one by one, as in the plain formula, and a row's numbers
            # are the same whether others of its batch draw.
            enable_fp_fusion=False,
            launch_pdl=self._overlap,
        )

    def confidence(self) -> Confidence:
        """Of all pieces, those of other ranks included; every id was in one."""
        tiles = self._tiles if self._share is None else self._share.join(self._tiles)
        ids, parts = self._split(tiles)
        num_rows, num_tiles = ids.shape
        token_ids = torch.empty(num_rows, dtype=torch.int64, device=ids.device)
        out = torch.empty(3, num_rows, dtype=torch.float32, device=ids.device)
        _join_kernel[(num_rows,)](
            ids,
            parts,
            token_ids,
            out,
            num_tiles,
            ids.numel(),
            BLOCK=triton.next_power_of_2(num_tiles),
            PDL=self._overlap,
            num_warps=1,
            launch_pdl=self._overlap,
        )
        return Confidence(token_ids, *out)

    def _split(self, tiles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids [N, C], and the other parts behind them."""
        return tiles[: self._num_rows], tiles[self._num_rows :].view(torch.float32)


def confidence_triton(
    logits_NV: torch.Tensor, banned_ids: torch.Tensor | None = None
) -> Confidence:
    """`confidence_ref` in two launches; rows are contiguous, float64 is not there."""
    num_rows, vocab = logits_NV.shape
    parts = TileParts(num_rows, vocab, logits_NV.device)
    parts.add(logits_NV, 0, banned_ids)
    return parts.confidence()

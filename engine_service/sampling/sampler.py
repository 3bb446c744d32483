"""Chooses one token for every decided position of a batch.

It does not know strategies, spans or requests: positions in, tokens and probabilities out. Kernels
do it on CUDA, the formulas here on the CPU and for float64; both give the same tokens, up to the
last bits of logarithms. Shape legend: N decided positions, V vocabulary, k alternatives.
"""

from __future__ import annotations

import torch

from engine_service.kernels.candidates import Filters
from engine_service.kernels.confidence import (
    PIECE,
    Confidence,
    Rescore,
    confidence,
    confidence_of_pieces,
)
from engine_service.kernels.filters import draw_filtered_triton
from engine_service.kernels.head_confidence import head_confidence_triton, head_pieces
from engine_service.kernels.jit import runs_triton
from engine_service.kernels.penalties import Penalties, Slots, adjusted_scores_triton
from engine_service.kernels.sampling import draw_tokens_triton
from engine_service.kernels.streams import Streams
from engine_service.sampling.batch import DecideBatch
from engine_service.sampling.filters import keep_likely
from engine_service.sampling.held import HeldIds, left_out
from engine_service.sampling.logprobs import Scores, score_tokens
from engine_service.sampling.processors import adjust, allowed_logits
from engine_service.sampling.rng import Purpose, draw_keys, gumbel

_OPEN_STEP = 64
"""Rows by which the number of open positions is rounded up on a GPU. A head takes as long for fewer
rows, in which its weight is read."""


def choose(batch: DecideBatch, draws: torch.Tensor) -> torch.Tensor:
    """[N] int64: samples every decided position on its own, Gumbel-max, or argmax at temperature 0.

    `draws` [N] int64 counts the draws already made at a position (the denoising step; 0 for
    autoregression). Order of what applies: banned ids, penalties, bias, minimum length,
    temperature, top-k, top-p, min-p. Of equal scores the lowest id wins.
    """
    share = batch.logits.share
    if share is not None and batch.wants.is_plain and runs_triton(batch.tables.temperature):
        own, banned = batch.logits.own(), batch.tables.banned_ids
        return draw_tokens_triton(own, _streams(batch, draws), banned, share)
    if runs_triton(batch.logits_NV):
        return choose_on_device(batch, draws)
    scores = adjust(allowed_logits(batch), batch)
    token_ids = scores.argmax(dim=1)
    if batch.wants.sampling:
        is_drawn = batch.tables.temperature[batch.rows] > 0
        token_ids = torch.where(is_drawn, _draw(scores, draws, batch), token_ids)
    return token_ids


def choose_on_device(batch: DecideBatch, draws: torch.Tensor) -> torch.Tensor:
    """`choose` by kernels: two launches, and more for what `wants` names.

    Every row finds out on the device whether it is greedy, so that one captured graph serves all
    batches of equal shape and equal `wants`.
    """
    wants, tables = batch.wants, batch.tables
    is_raw = not (wants.penalties or wants.bias or wants.suppress)
    scores = batch.logits_NV if is_raw else _adjust_on_device(batch)
    banned = tables.banned_ids if is_raw else None
    streams = _streams(batch, draws)
    if wants.sampling and wants.filters:
        filters = Filters(tables.top_k, tables.top_p, tables.min_p)
        return draw_filtered_triton(scores, streams, filters, banned)
    return draw_tokens_triton(scores, streams, banned)


def choose_with_confidence(
    batch: DecideBatch, draws: torch.Tensor, held: HeldIds | None = None
) -> Confidence:
    """`choose`, and how sure that is: by the softmax of the raw logits, without temperature, banned
    ids, those that are still suppressed, and those of `held`. A choice that is held has
    probability 0. `held` goes with `Wants.holds_ends`.

    Where the rows are plain only a piece of the logits exists at a time. Positions that are final
    get zeros where `num_open` says that leaving them out is worth it, unless log-probabilities are
    wanted, for which all logits are multiplied.
    """
    size = _num_chosen(batch)
    if size < len(batch.positions):
        return _choose_open(batch, draws, size, held)
    factors = batch.logits.factors() if batch.wants.is_plain else None
    if factors is not None:
        return _choose_by_head(batch, draws, *factors)
    token_ids = choose(batch, draws)
    with left_out(batch, held) as logits:
        sure = confidence(logits, batch.tables.banned_ids)
        ids = torch.stack((token_ids, sure.token_ids), dim=1)
        both = logits.gather(1, ids).to(sure.probs.dtype)
    # Finite, so that there is a difference where nothing is allowed.
    chosen, best = both.clamp(min=torch.finfo(both.dtype).min).unbind(1)
    return sure._replace(token_ids=token_ids, probs=sure.probs * (chosen - best).exp())


def _num_chosen(batch: DecideBatch) -> int:
    """How many of the positions are chosen for: all, or those that are open, rounded up where
    kernels are made for sizes."""
    count = len(batch.positions)
    if batch.num_open is None or batch.logits.is_known or batch.wants.max_logprobs is not None:
        return count
    step = _OPEN_STEP if runs_triton(batch.tables.temperature) else 1
    return min(count, max(1, -(-batch.num_open // step)) * step)


def _choose_open(
    batch: DecideBatch, draws: torch.Tensor, size: int, held: HeldIds | None
) -> Confidence:
    """Of the first `size` positions when those that are open come first. Nothing waits to know
    which they are."""
    is_final = batch.tables.fixed[batch.rows, batch.positions]
    places = is_final.to(torch.uint8).argsort(stable=True)[:size]
    choice = choose_with_confidence(batch.at(places), draws[places], held)
    count = len(is_final)
    return Confidence(*(one.new_zeros(count).index_copy(0, places, one) for one in choice))


def _choose_by_head(
    batch: DecideBatch, draws: torch.Tensor, x_NE: torch.Tensor, weight_VE: torch.Tensor
) -> Confidence:
    banned, is_drawn, share = batch.tables.banned_ids, batch.wants.sampling, batch.logits.share
    if runs_triton(x_NE):
        streams = _streams(batch, draws) if is_drawn else None
        return head_confidence_triton(x_NE, weight_VE, streams, banned, share)
    rescore = _rescorer(batch, draws) if is_drawn else None
    # Kernels alone exchange what ranks know of their ids; here each looks at all of them.
    whole = None if share is None else batch.logits_NV.split(PIECE, dim=1)
    return confidence_of_pieces(whole or head_pieces(x_NE, weight_VE, PIECE), banned, rescore)


def token_logprobs(batch: DecideBatch, token_ids: torch.Tensor) -> Scores | None:
    """Log-probabilities, ids and ranks at `token_ids` [N] and the likeliest ids; None if unwanted.

    They are those of the raw logits, before penalties and temperature; banned ids, and those that a
    row's mask lacks, are at -inf.
    """
    if batch.wants.max_logprobs is None:
        return None
    return score_tokens(allowed_logits(batch), token_ids, batch.wants.max_logprobs)


def _adjust_on_device(batch: DecideBatch) -> torch.Tensor:
    tables, wants = batch.tables, batch.wants
    penalties = Penalties(
        tables.tokens,
        tables.prompt_lens,
        tables.repetition_penalty,
        tables.presence_penalty,
        tables.frequency_penalty,
    )
    slots = Slots(
        tables.bias_ids,
        tables.bias_values,
        tables.suppress_ids,
        tables.min_tokens,
        tables.prompt_lens,
    )
    width = tables.tokens.shape[1] if batch.max_position is None else batch.max_position
    return adjusted_scores_triton(
        batch.logits_NV,
        batch.rows,
        batch.positions,
        tables.banned_ids,
        penalties=penalties if wants.penalties else None,
        slots=slots if wants.bias or wants.suppress else None,
        max_position=width,
    )


def _streams(batch: DecideBatch, draws: torch.Tensor) -> Streams:
    tables = batch.tables
    return Streams(
        batch.rows, batch.positions, draws, tables.temperature, tables.seeds, Purpose.TOKEN
    )


def _draw(scores: torch.Tensor, draws: torch.Tensor, batch: DecideBatch) -> torch.Tensor:
    """[N] int64 samples; rows of temperature 0 get a value that nobody reads."""
    if not batch.wants.filters:
        return _rescorer(batch, draws)(scores, 0).argmax(dim=1)
    values, ids = keep_likely(_scaled(scores, batch), batch)
    places = (values + gumbel(_keys(batch, draws), ids, scores.dtype)).argmax(dim=1)
    return ids.gather(1, places[:, None])[:, 0]


def _rescorer(batch: DecideBatch, draws: torch.Tensor) -> Rescore:
    """What draws a token of all ids: the best of logits / temperature + Gumbel noise; logits as
    they are at temperature 0."""
    keys, is_drawn = _keys(batch, draws), batch.tables.temperature[batch.rows] > 0

    def rescore(scores: torch.Tensor, first: int) -> torch.Tensor:
        ids = torch.arange(first, first + scores.shape[1], device=scores.device)
        noisy = _scaled(scores, batch) + gumbel(keys, ids, scores.dtype)
        return torch.where(is_drawn[:, None], noisy, scores)

    return rescore


def _keys(batch: DecideBatch, draws: torch.Tensor) -> torch.Tensor:
    return draw_keys(batch.tables.seeds[batch.rows], Purpose.TOKEN, batch.positions, draws)


def _scaled(scores: torch.Tensor, batch: DecideBatch) -> torch.Tensor:
    temperature = batch.tables.temperature[batch.rows]
    divisor = torch.where(temperature > 0, temperature, 1.0).to(scores.dtype)
    # A product with the reciprocal, as in the kernel: a quotient has other last bits.
    return scores * divisor.reciprocal()[:, None]

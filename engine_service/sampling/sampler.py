"""Chooses one token for every decided position of a batch.

It does not know strategies, spans or requests: positions in, tokens and probabilities out. Kernels
do it on CUDA, the formulas here on the CPU and for float64; both give the same tokens, up to the
last bits of logarithms. Shape legend: N decided positions, V vocabulary, k alternatives.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine_service.kernels.confidence import confidence
from engine_service.kernels.filters import Filters, redraw_filtered_triton
from engine_service.kernels.jit import runs_triton
from engine_service.kernels.penalties import Penalties, Slots, adjusted_scores_triton
from engine_service.kernels.sampling import Streams, draw_tokens_triton
from engine_service.sampling.batch import DecideBatch
from engine_service.sampling.filters import keep_likely
from engine_service.sampling.logprobs import Scores, score_tokens
from engine_service.sampling.processors import adjust, allowed_logits
from engine_service.sampling.rng import Purpose, draw_keys, gumbel


@dataclass(frozen=True, slots=True)
class Choice:
    """What was chosen at every decided position."""

    token_ids: torch.Tensor
    """[N] int64."""
    raw_NV: torch.Tensor
    """The logits before penalties and temperature."""
    banned_ids: torch.Tensor | None
    """[any] int64; None: `raw_NV` has them at -inf already."""
    known_probs: torch.Tensor | None = None
    """[N] `probs`, where choosing gave them."""

    @property
    def probs(self) -> torch.Tensor:
        """[N] softmax of the raw logits (no temperature, no banned ids) at the chosen token.

        Computed when asked for, if it is not known: greedy autoregression never does.
        """
        if self.known_probs is not None:
            return self.known_probs
        if self.banned_ids is None:
            total = self.raw_NV.logsumexp(dim=1)
        else:
            total = confidence(self.raw_NV, self.banned_ids).logsumexp
        chosen = self.raw_NV.gather(1, self.token_ids[:, None])[:, 0]
        return (chosen - total).exp()


def choose(batch: DecideBatch, draws: torch.Tensor, *, with_probs: bool = False) -> Choice:
    """Samples every decided position on its own: Gumbel-max, or argmax at temperature 0.

    `draws` [N] int64 counts the draws already made at a position (the denoising step; 0 for
    autoregression). Order of what applies: banned ids, penalties, bias, minimum length,
    temperature, top-k, top-p, min-p. Of equal scores the lowest id wins. `with_probs` says that
    the choice's `probs` will be read; the kernel then takes them from the same pass.
    """
    if runs_triton(batch.logits_NV):
        return choose_on_device(batch, draws, with_probs=with_probs)
    raw = allowed_logits(batch)
    scores = adjust(raw, batch)
    token_ids = scores.argmax(dim=1)
    if batch.wants.sampling:
        temperature = batch.tables.temperature[batch.rows]
        drawn = _draw(scores, temperature, draws, batch)
        token_ids = torch.where(temperature > 0, drawn, token_ids)
    return Choice(token_ids, raw, None)


def choose_on_device(batch: DecideBatch, draws: torch.Tensor, *, with_probs: bool) -> Choice:
    """`choose` by kernels: two launches, and more for what `wants` names.

    Every row finds out on the device whether it is greedy, so that one captured graph serves all
    batches of equal shape and equal `wants`.
    """
    wants, tables, banned = batch.wants, batch.tables, batch.tables.banned_ids
    is_raw = not (wants.penalties or wants.bias or wants.suppress)
    scores = batch.logits_NV if is_raw else _adjust_on_device(batch)
    streams = Streams(
        batch.rows, batch.positions, draws, tables.temperature, tables.seeds, Purpose.TOKEN
    )
    filtered = wants.sampling and wants.filters
    drawn = draw_tokens_triton(
        scores,
        streams,
        banned if is_raw else None,
        with_probs=with_probs and is_raw and not filtered,
    )
    if filtered:
        filters = Filters(tables.top_k, tables.top_p, tables.min_p)
        redraw_filtered_triton(
            scores, drawn.token_ids, streams, filters, banned if is_raw else None
        )
    return Choice(drawn.token_ids, batch.logits_NV, banned, drawn.probs)


def token_logprobs(batch: DecideBatch, token_ids: torch.Tensor) -> Scores | None:
    """Log-probabilities, ids and ranks at `token_ids` [N] and the likeliest ids; None if unwanted.

    They are those of the raw logits (banned ids at -inf), before penalties and temperature.
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


def _draw(
    scores: torch.Tensor, temperature: torch.Tensor, draws: torch.Tensor, batch: DecideBatch
) -> torch.Tensor:
    """[N] int64 samples; rows of temperature 0 get a value that nobody reads."""
    divisor = torch.where(temperature > 0, temperature, 1.0).to(scores.dtype)
    # A product with the reciprocal, as in the kernel: a quotient has other last bits.
    scaled = scores * divisor.reciprocal()[:, None]
    seeds = batch.tables.seeds[batch.rows]
    keys = draw_keys(seeds, Purpose.TOKEN, batch.positions, draws)
    if not batch.wants.filters:
        every_id = torch.arange(scores.shape[1], device=scores.device)
        return (scaled + gumbel(keys, every_id, scores.dtype)).argmax(dim=1)
    values, ids = keep_likely(scaled, batch)
    places = (values + gumbel(keys, ids, scores.dtype)).argmax(dim=1)
    return ids.gather(1, places[:, None])[:, 0]

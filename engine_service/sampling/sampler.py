"""Chooses one token for every decided position of a batch.

It does not know strategies, spans or requests: positions in, tokens and probabilities out.
Shape legend: N decided positions, V vocabulary, k alternatives.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

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
    """The raw logits with banned ids at -inf."""

    @property
    def probs(self) -> torch.Tensor:
        """[N] softmax of the raw logits (no temperature) at the chosen token.

        Computed when asked for: greedy autoregression never does.
        """
        chosen = self.raw_NV.gather(1, self.token_ids[:, None])[:, 0]
        return (chosen - self.raw_NV.logsumexp(dim=1)).exp()


def choose(batch: DecideBatch, draws: torch.Tensor) -> Choice:
    """Samples every decided position on its own: Gumbel-max, or argmax at temperature 0.

    `draws` [N] int64 counts the draws already made at a position (the denoising step; 0 for
    autoregression). Order of what applies: banned ids, penalties, bias, minimum length,
    temperature, top-k, top-p, min-p. Of equal scores the lowest id wins.
    """
    raw = allowed_logits(batch)
    scores = adjust(raw, batch)
    token_ids = scores.argmax(dim=1)
    if batch.wants.sampling:
        temperature = batch.tables.temperature[batch.rows]
        drawn = _draw(scores, temperature, draws, batch)
        token_ids = torch.where(temperature > 0, drawn, token_ids)
    return Choice(token_ids, raw)


def token_logprobs(batch: DecideBatch, token_ids: torch.Tensor) -> Scores | None:
    """Log-probabilities, ids and ranks at `token_ids` [N] and the likeliest ids; None if unwanted.

    They are those of the raw logits (banned ids at -inf), before penalties and temperature.
    """
    if batch.wants.max_logprobs is None:
        return None
    return score_tokens(allowed_logits(batch), token_ids, batch.wants.max_logprobs)


def _draw(
    scores: torch.Tensor, temperature: torch.Tensor, draws: torch.Tensor, batch: DecideBatch
) -> torch.Tensor:
    """[N] int64 samples; rows of temperature 0 get a value that nobody reads."""
    divisor = torch.where(temperature > 0, temperature, 1.0).to(scores.dtype)
    scaled = scores / divisor[:, None]
    seeds = batch.tables.seeds[batch.rows]
    keys = draw_keys(seeds, Purpose.TOKEN, batch.positions, draws)
    if not batch.wants.filters:
        every_id = torch.arange(scores.shape[1], device=scores.device)
        return (scaled + gumbel(keys, every_id, scores.dtype)).argmax(dim=1)
    values, ids = keep_likely(scaled, batch)
    places = (values + gumbel(keys, ids, scores.dtype)).argmax(dim=1)
    return ids.gather(1, places[:, None])[:, 0]

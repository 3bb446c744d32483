"""What changes scores before a token is chosen: bans, penalties, bias, minimum length.

Every function is vectorised over rows and reads each row's own values from the tables; none
keeps state between steps. They do not know how a token is chosen afterwards.
"""

from __future__ import annotations

import torch

from engine_service.sampling.batch import DecideBatch
from engine_service.sampling.held import suppressed

_NEVER = float("-inf")


def allowed_logits(batch: DecideBatch) -> torch.Tensor:
    """[N, V] raw logits in at least float32 with the banned ids at -inf; never writes to the batch.

    Without banned ids it may be the batch's own tensor: do not write to it.
    """
    logits = batch.logits_NV
    if logits.dtype not in (torch.float32, torch.float64):
        logits = logits.float()
    if batch.tables.banned_ids.numel() == 0:
        return logits
    return logits.index_fill(1, batch.tables.banned_ids, _NEVER)


def adjust(logits: torch.Tensor, batch: DecideBatch) -> torch.Tensor:
    """Penalties, then bias, then minimum length; `logits` [N, V] itself stays as it is."""
    wants = batch.wants
    if not (wants.penalties or wants.bias or wants.suppress):
        return logits
    scores = logits.clone()
    if wants.penalties:
        _penalize(scores, batch)
    if wants.bias:
        _add_bias(scores, batch)
    if wants.suppress:
        _suppress(scores, batch)
    return scores


def _penalize(scores: torch.Tensor, batch: DecideBatch) -> None:
    """Repetition over prompt and output (arXiv 1909.05858), presence and frequency over output.

    Counts are made anew from the token table, so nothing must be kept, copied or rebuilt after a
    preemption; positions at or behind the decided one do not count.
    """
    tables, rows = batch.tables, batch.rows
    width = tables.tokens.shape[1] if batch.max_position is None else batch.max_position
    tokens = tables.tokens[rows, :width]
    places = torch.arange(width, device=tokens.device)
    before = places < batch.positions[:, None]
    in_output = before & (places >= tables.prompt_lens[rows, None])
    seen = torch.zeros_like(scores).scatter_add_(1, tokens, before.to(scores.dtype)) > 0
    counts = torch.zeros_like(scores).scatter_add_(1, tokens, in_output.to(scores.dtype))
    repetition = tables.repetition_penalty[rows, None].to(scores.dtype)
    penalized = torch.where(scores > 0, scores / repetition, scores * repetition)
    scores.copy_(torch.where(seen, penalized, scores))
    scores -= tables.frequency_penalty[rows, None].to(scores.dtype) * counts
    scores -= tables.presence_penalty[rows, None].to(scores.dtype) * (counts > 0)


def _add_bias(scores: torch.Tensor, batch: DecideBatch) -> None:
    ids = batch.tables.bias_ids[batch.rows]
    values = batch.tables.bias_values[batch.rows].to(scores.dtype)
    scores.scatter_add_(1, ids.clamp(min=0), values.masked_fill(ids < 0, 0.0))


def _suppress(scores: torch.Tensor, batch: DecideBatch) -> None:
    ids, applies = suppressed(batch)
    values = torch.zeros_like(ids, dtype=scores.dtype).masked_fill(applies, _NEVER)
    scores.scatter_add_(1, ids, values)

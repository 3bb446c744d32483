"""Ids that do not count in how sure a row is of its choices, be they choosable or not.

It does not know why an id is held back. Shape legend: N decided positions, V vocabulary, R rows, K
ids that some row holds back, E suppressed ids.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from engine_service.sampling.batch import DecideBatch


class HeldIds(NamedTuple):
    """Which ids which rows hold back."""

    ids: torch.Tensor
    """[K] int64."""
    rows: torch.Tensor
    """[R] bool: rows that hold them back."""
    when_drawn: torch.Tensor
    """[K] bool: also at temperatures above 0, not only where the likeliest id is chosen."""

    def at(self, batch: DecideBatch) -> torch.Tensor:
        """[N, K] bool: ids that are held back at a position."""
        is_greedy = batch.tables.temperature[batch.rows] == 0
        return self.rows[batch.rows, None] & (self.when_drawn | is_greedy[:, None])

    def chosen(self, batch: DecideBatch, token_ids: torch.Tensor) -> torch.Tensor:
        """[N] bool: positions whose choice `token_ids` [N] is held back."""
        return ((token_ids[:, None] == self.ids) & self.at(batch)).any(dim=1)


@contextmanager
def left_out(batch: DecideBatch, held: HeldIds | None) -> Iterator[torch.Tensor]:
    """The batch's logits [N, V], in which ids that are held back or still suppressed have -inf.

    They are the batch's own: what was there comes back at the end, because log-probabilities are
    read from them later and a copy of N x V would take as much memory again.
    """
    logits, out = batch.logits_NV, []
    if batch.wants.suppress:
        out.append(suppressed(batch))
    if held is not None:
        is_held = held.at(batch)
        out.append((held.ids.expand_as(is_held), is_held))
    if not out:
        yield logits
        return
    ids, applies = (torch.cat(parts, dim=1) for parts in zip(*out, strict=True))
    before = logits.gather(1, ids)
    logits.scatter_add_(1, ids, torch.zeros_like(before).masked_fill_(applies, -torch.inf))
    try:
        yield logits
    finally:
        logits.scatter_(1, ids, before)


def suppressed(batch: DecideBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """([N, E] ids, any valid one where there is none; [N, E] bool: they may not be chosen yet)."""
    tables, rows = batch.tables, batch.rows
    ids = tables.suppress_ids[rows]
    too_early = batch.positions - tables.prompt_lens[rows] < tables.min_tokens[rows]
    return ids.clamp(min=0), (ids >= 0) & too_early[:, None]

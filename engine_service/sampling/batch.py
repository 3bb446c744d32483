"""What a strategy's device half gets to decide from: logits, rows and the device tables.

Shape legend: N decided positions of all spans of one strategy, V vocabulary, R spans.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from engine_service.sampling.head import Logits
    from engine_service.sampling.tables import SamplingTables


@dataclass(frozen=True, slots=True, kw_only=True)
class DecideBatch:
    """The decided positions of all spans that share one strategy, span after span."""

    logits: Logits
    """Of every decided position; multiplied when they are read."""
    rows: torch.Tensor
    """[N] int64: row of every decided position."""
    positions: torch.Tensor
    """[N] int64: the position whose token is decided."""
    span_rows: torch.Tensor
    """[R] int64: row of every span."""
    cu_decide: torch.Tensor
    """[R + 1] int64: span r owns decided positions [cu[r], cu[r + 1])."""
    tables: SamplingTables
    """Tokens, fixed bits and sampling parameters of every row (see sampling/tables.py)."""
    wants: Wants
    max_position: int | None = None
    """Host upper bound of `positions`; None: the width of the token table."""
    num_open: int | None = None
    """Host upper bound of how many of them are not final, those of padding, which come last, left
    out; None: N."""

    @property
    def logits_NV(self) -> torch.Tensor:
        """All logits at once."""
        return self.logits.whole()

    def at(self, places: torch.Tensor) -> DecideBatch:
        """Of the decided positions only those at `places` [M] int64, as one that knows no spans."""
        nothing = self.span_rows[:0]
        return replace(
            self,
            logits=self.logits.at(places),
            rows=self.rows[places],
            positions=self.positions[places],
            span_rows=nothing,
            cu_decide=nothing,
            num_open=None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Wants:
    """What any row of the batch needs; decided on the host so that unused work is skipped."""

    sampling: bool
    """Some temperature is above zero."""
    filters: bool
    """Some row has top_k, top_p or min_p."""
    penalties: bool
    bias: bool
    suppress: bool
    """Some row may still lie below its min_tokens."""
    max_logprobs: int | None
    """Most alternatives any row wants; None: no row wants log-probabilities."""
    mask: bool = False
    """Some row may not choose every id."""
    max_top_k: int | None = None
    """Largest top_k of the sampling rows; None: some of them has none."""
    holds_ends: bool = False
    """Some row's ends do not count in how sure its choices are (sampling/held.py)."""

    @property
    def is_plain(self) -> bool:
        """Greedy and temperature alone: every row is decided in one pass over its logits."""
        return self.only_draws and not self.filters

    @property
    def only_draws(self) -> bool:
        """Greedy, temperature, top-k, top-p and min-p alone: every row is decided by its logits as
        they are and by numbers that stand in its line of the tables."""
        return not (
            self.penalties
            or self.bias
            or self.suppress
            or self.mask
            or self.holds_ends
            or self.max_logprobs is not None
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DecideResult:
    """On the device, aligned with the decided positions. Copied to the host by collect."""

    token_ids: torch.Tensor
    """[N] int64."""
    final: torch.Tensor | None
    """[N] bool; None: all of them."""
    logprobs: torch.Tensor | None
    """[N, 1 + max_logprobs] float32, the chosen token first."""
    logprob_ids: torch.Tensor | None
    """[N, 1 + max_logprobs] int64."""
    ranks: torch.Tensor | None
    """[N] int64, 1 = most likely."""
    confidence: torch.Tensor | None = None
    """[N] probability of the token chosen, anything at what was final before; None from methods
    that do not go by it."""

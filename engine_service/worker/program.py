"""The device work of a step: embed, forward, decide. Nothing here waits for the device.

The same calls run eagerly or while a CUDA graph is captured. It does not know plans or hosts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from engine_service.attention.base import (
    AsideStep,
    AttentionBackend,
    AttentionStep,
    LayerCache,
    plan_step,
)
from engine_service.core.strategy import DecodeStrategy
from engine_service.models.base import CausalModel
from engine_service.sampling.batch import DecideBatch, DecideResult
from engine_service.sampling.head import HeadLogits, KnownLogits, Logits, UnfinishedLogits
from engine_service.sampling.logprobs import Scores, score_tokens
from engine_service.sampling.masks import masked_logits
from engine_service.stages import WHOLE, Stage
from engine_service.worker.batch import AsidePart, DecidePart, ForwardBatch, ScorePart
from engine_service.worker.pooling import Pooled, PoolPart, pool
from engine_service.worker.tables import RowTables


class States(NamedTuple):
    """What a step's layers leave of its tokens."""

    hidden_TE: torch.Tensor
    mixed_TC: torch.Tensor | None = None
    """The last layer's attention, where `CausalModel.finish` is still to add it."""

    def at(self, queries_N: torch.Tensor, out: States | None = None) -> States:
        """Those of some tokens; written over the first rows of `out` where that is given."""
        (hidden_TE, mixed_TC), (hidden_out, mixed_out) = self, out or (None, None)
        hidden_NE = _pick(hidden_TE, queries_N, hidden_out)
        if mixed_TC is None:
            return States(hidden_NE)
        return States(hidden_NE, _pick(mixed_TC, queries_N, mixed_out))


def _pick(rows_TC: torch.Tensor, queries_N: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    out_NC = None if out is None else out[: len(queries_N)]
    return torch.index_select(rows_TC, 0, queries_N, out=out_NC)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProgram:
    """What a step runs on; `strategies` are in the order of the tables' methods."""

    model: CausalModel
    backend: AttentionBackend
    caches: Sequence[LayerCache]
    tables: RowTables
    strategies: Sequence[DecodeStrategy]
    cache_aside: LayerCache | None = None
    """For what is computed aside of the pages, by all layers in turn."""
    stage: Stage = WHOLE
    """Of which these are the layers; only the last one has what follows the forward."""

    def forward(self, batch: ForwardBatch, reads: torch.Tensor | None = None) -> torch.Tensor:
        """[T, E] hidden states; the step's keys and values are stored. A stage ahead of the last
        one has passed them on, and nobody may write to them.

        `reads` [N] int64 are the tokens whose states the caller reads; None: maybe all of them.
        """
        hidden = self.compute(batch, self._enter(batch), reads)
        self.pass_on(hidden)
        return hidden

    def states(self, batch: ForwardBatch) -> States:
        """`forward` of the last stage, for the batch's own decisions and scores. Where nothing but
        reveals reads them the last layer does not end here: it does so for positions that are still
        open, once whoever decides has found out which they are."""
        if not (self.model.finishes_rows and batch.only_decides and self._reveals(batch)):
            return States(self.forward(batch, batch.reads))
        hidden_TE = self._enter(batch)
        return States(hidden_TE, self.model.mix(hidden_TE, batch.positions, self._plan(batch)))

    def _reveals(self, batch: ForwardBatch) -> bool:
        """Whether all that is decided may be left out where it is final; guided positions are not:
        they are multiplied in any case."""
        return bool(batch.decides) and not any(
            part.guided is not None or self.strategies[part.layout.method].append_only
            for part in batch.decides
        )

    def embed(self, batch: ForwardBatch) -> torch.Tensor:
        """[T, E] that the first stage begins with."""
        return self.model.embed(self.tables.sampling.tokens.view(-1), batch.places)

    def receive(self, hidden_TE: torch.Tensor) -> None:
        """Fills it with what the stage ahead of this one passes on; with zeros if nobody does."""
        if self.stage.links is None:
            hidden_TE.zero_()
        else:
            self.stage.links.receive(hidden_TE)

    def compute(
        self, batch: ForwardBatch, hidden_TE: torch.Tensor, reads: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[T, E] that the layers of this stage make of `hidden_TE`, which they overwrite. Nothing
        of it depends on other stages, so that a graph can be captured of it."""
        hidden: torch.Tensor = self.model(hidden_TE, batch.positions, self._plan(batch), reads)
        return hidden

    def pass_on(self, hidden_TE: torch.Tensor) -> None:
        """To the stage behind this one, if there is one; nobody may write to it any more."""
        if self.stage.links is not None and not self.stage.is_last:
            self.stage.links.pass_on(hidden_TE)

    def _enter(self, batch: ForwardBatch) -> torch.Tensor:
        """[T, E] that the first of these layers reads."""
        if self.stage.is_first:
            return self.embed(batch)
        hidden_TE = torch.empty(
            (len(batch.places), self.model.traits.hidden_size),
            dtype=self.backend.shape.dtype,
            device=batch.places.device,
        )
        self.receive(hidden_TE)
        return hidden_TE

    def _plan(self, batch: ForwardBatch) -> AttentionStep:
        windows = self.model.traits.windows
        step = plan_step(self.backend, batch.attention, windows=windows, caches=self.caches)
        if batch.aside is None:
            return step
        return replace(step, aside=self._plan_aside(batch.aside))

    def _plan_aside(self, part: AsidePart) -> AsideStep:
        assert self.cache_aside is not None, "a step aside of the pages without a cache for it"
        traits = self.model.traits
        caches = (self.cache_aside,) * traits.num_layers
        step = plan_step(self.backend, part.attention, windows=traits.windows, caches=caches)
        return AsideStep(first=part.first, step=step, kept=part.kept_keys(self.caches))

    def logits(self, part: DecidePart, states: States) -> Logits:
        """Of the part's positions; not multiplied yet, unless some are guided."""
        own = self.logits_of(states.at(part.queries))
        if part.guided is None or part.unguided_queries is None:
            return own
        logits = own.whole()
        unguided = self.model.logits(states.at(part.unguided_queries).hidden_TE)
        strategy, rows = self.strategies[part.layout.method], part.rows[part.guided]
        guided = strategy.guide(logits.index_select(0, part.guided), unguided, rows)
        return KnownLogits(logits.index_copy(0, part.guided, guided))

    def logits_of(self, states: States) -> Logits:
        """Of some tokens; their states may be overwritten."""
        hidden_NE, mixed_NC = states
        if mixed_NC is None:
            return HeadLogits(self.model, hidden_NE)
        return UnfinishedLogits(self.model, hidden_NE, mixed_NC)

    def decide(self, part: DecidePart, logits: Logits) -> DecideResult:
        """Lets the part's strategy decide; it writes tokens and fixed bits into the tables."""
        layout = part.layout
        batch = DecideBatch(
            logits=logits,
            rows=part.rows,
            positions=part.positions,
            span_rows=part.span_rows,
            cu_decide=part.cu_decide,
            tables=self.tables.sampling,
            wants=layout.wants,
            max_position=layout.max_position,
            num_open=layout.num_open,
        )
        batch = replace(batch, logits=masked_logits(batch))
        result: DecideResult = self.strategies[layout.method].decide(batch)
        return result

    def score(self, part: ScorePart, hidden: torch.Tensor, chunk: int) -> Scores:
        """Log-probabilities of known tokens, `chunk` rows of logits at a time."""
        count = max(0, int(part.layout.logprob_counts.max()))
        pieces = [
            score_tokens(self.model.logits(hidden.index_select(0, queries)).float(), ids, count)
            for queries, ids in zip(
                part.queries.split(chunk), part.token_ids.split(chunk), strict=True
            )
        ]
        return Scores(*(torch.cat(column) for column in zip(*pieces, strict=True)))

    def pool(self, part: PoolPart, hidden: torch.Tensor) -> Pooled:
        """Vectors of the prompts that end in this step."""
        rows = self.tables.pooled
        assert rows is not None, "a step pools without rows for it"
        return pool(part, hidden, rows.sums, self.model.features, self.model.label_probs)

"""What a step made: tensors, or the bytes that the last stage of a pipeline tells the others.

Both ends find the same places from the same layout, so nothing but the numbers travels. It does not
know plans.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import torch

from engine_service.core.strategy import DecodeStrategy
from engine_service.models.base import ModelTraits
from engine_service.sampling.batch import DecideResult
from engine_service.sampling.logprobs import Scores
from engine_service.staging import stage
from engine_service.worker.layout import StepLayout
from engine_service.worker.pooling import Pooled, PoolLayout
from engine_service.worker.tables import RowTables
from engine_service.worker.wanted import DecideLayout, ScoreLayout

_ALIGN = 8
"""Bytes of the widest number."""
_RESULT = tuple(one.name for one in fields(DecideResult))


class _Column(NamedTuple):
    """One tensor of an outcome; None in its place: it has none."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def room(self) -> int:
        return -(-self.nbytes // _ALIGN) * _ALIGN


@dataclass(slots=True)
class Outcome:
    """One result for every part of the layout that decides, in its order."""

    decided: list[DecideResult] = field(default_factory=list)
    scores: Scores | None = None
    pooled: Pooled | None = None

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Outcome:
        """The same with every tensor replaced."""
        changed = iter([None if one is None else change(one) for one in self.columns])
        has = {"has_scores": self.scores is not None, "has_pooled": self.pooled is not None}
        return _assemble(changed, len(self.decided), **has)

    @property
    def columns(self) -> list[torch.Tensor | None]:
        """Scores first, then what was pooled, then every part."""
        columns: list[torch.Tensor | None] = [*(self.scores or ()), *(self.pooled or ())]
        for result in self.decided:
            columns += [getattr(result, name) for name in _RESULT]
        return columns


@dataclass(frozen=True, slots=True)
class Telling:
    """How the outcomes of a model's steps become bytes. `strategies` are in the tables' order."""

    traits: ModelTraits
    strategies: Sequence[DecodeStrategy]

    def size(self, layout: StepLayout) -> int:
        """Bytes that a step's outcome takes."""
        return sum(one.room for one in self._columns(layout) if one)

    def pack(self, layout: StepLayout, outcome: Outcome) -> torch.Tensor:
        """[size] uint8 on the outcome's device."""
        columns = self._columns(layout)
        tensors = [
            None if one is None or tensor is None else tensor.to(one.dtype)
            for one, tensor in zip(columns, outcome.columns, strict=True)
        ]
        device = next(tensor.device for tensor in tensors if tensor is not None)
        words = torch.zeros(self.size(layout), dtype=torch.uint8, device=device)
        for one, tensor, place in zip(columns, tensors, _places(columns, words), strict=True):
            assert (one is None) == (tensor is None), f"{one} of a step is not there"
            if one is not None and tensor is not None:
                assert tuple(tensor.shape) == one.shape, f"{tuple(tensor.shape)} is not {one.shape}"
                place.copy_(tensor.contiguous().view(-1).view(torch.uint8))
        return words

    def unpack(self, layout: StepLayout, words: torch.Tensor) -> Outcome:
        """What `pack` was given."""
        columns = self._columns(layout)
        tensors = [
            None if one is None else place.view(one.dtype).view(one.shape)
            for one, place in zip(columns, _places(columns, words), strict=True)
        ]
        has = {"has_scores": layout.scores is not None, "has_pooled": layout.pools is not None}
        return _assemble(iter(tensors), len(layout.decides), **has)

    def _columns(self, layout: StepLayout) -> list[_Column | None]:
        """In the order of Outcome.columns."""
        columns: list[_Column | None] = []
        if layout.scores is not None:
            columns += self._of_scores(layout.scores)
        if layout.pools is not None:
            columns += self._of_pools(layout.pools)
        for part in layout.decides:
            columns += self._of_part(part)
        return columns

    def _of_scores(self, part: ScoreLayout) -> list[_Column]:
        return self._entries(len(part.queries), max(0, int(part.logprob_counts.max())))

    def _of_pools(self, part: PoolLayout) -> list[_Column | None]:
        count, num_all = part.num_embedded, len(part.ending)
        embeddings = _Column((count, self.traits.hidden_size), torch.float32)
        labels = _Column((num_all - count, self.traits.num_labels), torch.float32)
        return [embeddings if count else None, labels if count < num_all else None]

    def _of_part(self, part: DecideLayout) -> list[_Column | None]:
        """In the order of DecideResult. Methods that only append have neither open positions nor
        confidences."""
        count, most = len(part.rows), part.wants.max_logprobs
        reveals = not self.strategies[part.method].append_only
        scored = [None] * 3 if most is None else self._entries(count, most)
        return [
            _Column((count,), torch.int64),
            _Column((count,), torch.bool) if reveals else None,
            *scored,
            _Column((count,), torch.float32) if reveals else None,
        ]

    def _entries(self, count: int, most: int) -> list[_Column]:
        """Of Scores."""
        shape = (count, 1 + min(most, self.traits.vocab_size))
        numbers = _Column(shape, torch.float32), _Column(shape, torch.int64)
        return [*numbers, _Column((count,), torch.int64)]


def write_tokens(tables: RowTables, layout: StepLayout, outcome: Outcome) -> None:
    """What the last stage has decided, into the table that the first one embeds from. Its rows are
    in no other step by now. Does not wait for those."""
    tokens = tables.sampling.tokens
    for part, result in zip(layout.decides, outcome.decided, strict=True):
        places = part.rows * tables.width + part.positions
        where, ids = stage([places, result.token_ids.numpy()], tables.device)
        tokens.view(-1).index_copy_(0, where, ids)


def _places(columns: Sequence[_Column | None], words: torch.Tensor) -> Iterator[torch.Tensor]:
    """The bytes of every column."""
    start = 0
    for one in columns:
        size, room = (0, 0) if one is None else (one.nbytes, one.room)
        yield words[start : start + size]
        start += room


def _assemble(
    columns: Iterator[Any], num_parts: int, *, has_scores: bool, has_pooled: bool
) -> Outcome:
    """From the columns of an outcome."""
    return Outcome(
        scores=Scores(*(next(columns) for _ in Scores._fields)) if has_scores else None,
        pooled=Pooled(*(next(columns) for _ in Pooled._fields)) if has_pooled else None,
        decided=[
            DecideResult(**{name: next(columns) for name in _RESULT}) for _ in range(num_parts)
        ],
    )

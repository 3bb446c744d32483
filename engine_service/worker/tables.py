"""The rows of the device: tokens, sampling parameters and pages of every running request.

Single writer of all of it, apart from the tokens and fixed bits that a strategy decides. It does
not know requests or strategies: a row is admitted, grows pages, and is overwritten by the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import IntEnum
from itertools import chain

import numpy as np
import torch

from engine_service.core.step import NewRow, PageAppend, RowMask
from engine_service.sampling.batch import Wants
from engine_service.sampling.rng import request_seed
from engine_service.sampling.tables import SamplingTables
from engine_service.staging import stage
from engine_service.worker.masks import MaskTable
from engine_service.worker.page_table import PageTable
from engine_service.worker.pool_rows import PoolRows

_FIRST_SLOTS = 8
_NO_BOUND = np.iinfo(np.int64).max
_INTEGERS = ("prompt_lens", "top_k", "seeds", "min_tokens")
_FLOATS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)


class _Demand(IntEnum):
    """Columns of the host mirror that says what a row needs; rows are joined by the maximum."""

    SAMPLING = 0
    FILTERS = 1
    PENALTIES = 2
    BIAS = 3
    SUPPRESS_UNTIL = 4
    LOGPROBS = 5
    TOP_K = 6
    HOLDS_ENDS = 7


def _demands_of(new: NewRow) -> tuple[int, ...]:
    """In the order of _Demand."""
    sampling = new.sampling
    draws = sampling.temperature > 0
    penalized = (
        sampling.repetition_penalty != 1
        or sampling.presence_penalty != 0
        or sampling.frequency_penalty != 0
    )
    filtered = sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0
    delays_stop = sampling.min_tokens > 0 and len(sampling.suppress) > 0
    bound = sampling.top_k if sampling.top_k > 0 else _NO_BOUND
    return (
        draws,
        draws and filtered,
        penalized,
        len(sampling.logit_bias) > 0,
        new.prompt_len + sampling.min_tokens if delays_stop else 0,
        -1 if sampling.logprobs is None else sampling.logprobs,
        bound if draws else 0,
        new.params.holds_ends,
    )


class RowTables:
    """Device tables and, for what the host must look up every step, numpy mirrors of them.

    Shape legend as in sampling/tables.py.
    """

    def __init__(
        self,
        *,
        max_rows: int,
        table_width: int,
        page_size: int,
        trash_page: int,
        mask_token_id: int | None,
        methods: Sequence[str],
        device: torch.device,
        in_pieces: bool = False,
        pooled: PoolRows | None = None,
    ) -> None:
        """`in_pieces`: who decides for plain rows needs a piece of their logits at a time."""
        assert table_width % page_size == 0, f"width {table_width} is not whole pages"
        num_rows = max_rows + 1
        self.page_size = page_size
        self.device = device
        self.in_pieces = in_pieces
        self.pooled = pooled
        self._fill = mask_token_id or 0
        self._method_index = {name: index for index, name in enumerate(methods)}
        self._integers = torch.zeros(len(_INTEGERS), num_rows, dtype=torch.int64, device=device)
        self._floats = torch.zeros(len(_FLOATS), num_rows, dtype=torch.float32, device=device)
        self._floats[1] = 1.0
        self._floats[3] = 1.0
        self.sampling = self._create_sampling(num_rows, table_width, mask_token_id)
        self._masks = MaskTable(num_rows, device)
        self.pages = PageTable(num_rows, table_width // page_size, trash_page, device)
        self.method_of_row = np.zeros(num_rows, dtype=np.int64)
        self.prompt_len_of_row = np.zeros(num_rows, dtype=np.int64)
        self._demands = np.zeros((num_rows, len(_Demand)), dtype=np.int64)
        self._demands[:, _Demand.LOGPROBS] = -1
        self.logprobs_of_row = self._demands[:, _Demand.LOGPROBS]
        """Alternatives per decided token; -1: none are wanted."""
        self.prompt_logprobs_of_row = np.full(num_rows, -1, dtype=np.int64)

    def _create_sampling(self, rows: int, width: int, mask_token_id: int | None) -> SamplingTables:
        device = self.device
        banned = [] if mask_token_id is None else [mask_token_id]
        empty_slots = torch.full((rows, _FIRST_SLOTS), -1, dtype=torch.int64, device=device)
        return SamplingTables(
            tokens=torch.full((rows, width), self._fill, dtype=torch.int64, device=device),
            fixed=torch.zeros(rows, width, dtype=torch.bool, device=device),
            suppress_ids=empty_slots.clone(),
            bias_ids=empty_slots,
            bias_values=torch.zeros(rows, _FIRST_SLOTS, dtype=torch.float32, device=device),
            banned_ids=torch.tensor(banned, dtype=torch.int64, device=device),
            **dict(zip(_INTEGERS, self._integers, strict=True)),
            **dict(zip(_FLOATS, self._floats, strict=True)),
        )

    @property
    def trash_row(self) -> int:
        """The row behind the last real one: padding reads and writes there."""
        return len(self.method_of_row) - 1

    @property
    def trash_slot(self) -> int:
        """A KV slot that nobody reads."""
        return self.pages.trash_page * self.page_size

    @property
    def mask_place(self) -> int:
        """Where the mask token always stands in the flat token table: the padding row's end."""
        return len(self.method_of_row) * self.width - 1

    @property
    def width(self) -> int:
        """Positions per row."""
        return self.sampling.tokens.shape[1]

    def apply(
        self,
        new_rows: Sequence[NewRow],
        page_appends: Sequence[PageAppend],
        masks: Sequence[RowMask] = (),
    ) -> None:
        """Writes a plan's deltas: one write per table, however many rows there are."""
        if new_rows or masks:
            self._masks.apply(new_rows, masks)
            if self._masks.words is not self.sampling.masks:
                self.sampling = replace(self.sampling, masks=self._masks.words)
        if new_rows:
            self._write_tokens(new_rows)
            self._write_parameters(new_rows)
            self._write_slots(new_rows)
            self._write_mirrors(new_rows)
        if page_appends:
            self.pages.append(page_appends)

    def wants(self, rows: np.ndarray, first_position: int) -> Wants:
        """What sampling these rows takes; `first_position` is the lowest one they decide."""
        demands = self._demands[rows].max(axis=0).tolist()
        draws, filters, penalties, bias, suppress_until, logprobs, bound, holds_ends = demands
        return Wants(
            sampling=bool(draws),
            filters=bool(filters),
            penalties=bool(penalties),
            bias=bool(bias),
            suppress=suppress_until > first_position,
            max_logprobs=None if logprobs < 0 else logprobs,
            mask=bool(self._masks.has_mask[rows].any()),
            max_top_k=None if bound == _NO_BOUND else bound,
            holds_ends=bool(holds_ends),
        )

    def _write_tokens(self, new_rows: Sequence[NewRow]) -> None:
        rows = np.array([new.row for new in new_rows], dtype=np.int64)
        committed = np.array([len(new.token_ids) for new in new_rows], dtype=np.int64)
        tails = np.array([len(new.canvas.token_ids) for new in new_rows], dtype=np.int64)
        lengths = committed + tails
        total = int(lengths.sum())
        assert lengths.max() <= self.width, f"{lengths.max()} tokens in rows of {self.width}"
        ids = np.fromiter(
            chain.from_iterable(chain(new.token_ids, new.canvas.token_ids) for new in new_rows),
            dtype=np.int64,
            count=total,
        )
        starts = rows * self.width - (lengths.cumsum() - lengths)
        places = np.arange(total) + starts.repeat(lengths)
        fixed = np.ones(total, dtype=np.bool_)
        for new, end, size in zip(new_rows, lengths.cumsum(), tails, strict=True):
            fixed[end - size : end] = new.canvas.fixed
        pinned = [(new.row, *one) for new in new_rows for one in new.pinned]
        if pinned:
            line, position, token = np.array(pinned, dtype=np.int64).T
            assert position.max() < self.width, f"pinned at {position.max()} of {self.width}"
            places = np.concatenate((places, line * self.width + position))
            ids = np.concatenate((ids, token))
            fixed = np.concatenate((fixed, np.ones(len(pinned), dtype=np.bool_)))
        at, where, tokens, bits = stage([rows, places, ids, fixed], self.device)
        self.sampling.tokens.index_fill_(0, at, self._fill)
        self.sampling.fixed.index_fill_(0, at, 0)
        self.sampling.tokens.view(-1).index_copy_(0, where, tokens)
        self.sampling.fixed.view(-1).index_copy_(0, where, bits)

    def _write_parameters(self, new_rows: Sequence[NewRow]) -> None:
        rows = np.array([new.row for new in new_rows], dtype=np.int64)
        asked = [new.sampling for new in new_rows]
        integers = [
            [new.prompt_len for new in new_rows],
            [sampling.top_k for sampling in asked],
            [request_seed(sampling.seed, sampling.choice) for sampling in asked],
            [sampling.min_tokens for sampling in asked],
        ]
        floats = [[getattr(sampling, name) for sampling in asked] for name in _FLOATS]
        at, whole, real = stage(
            [rows, np.array(integers, dtype=np.int64), np.array(floats, dtype=np.float32)],
            self.device,
        )
        self._integers.index_copy_(1, at, whole)
        self._floats.index_copy_(1, at, real)

    def _write_slots(self, new_rows: Sequence[NewRow]) -> None:
        """Suppressed ids and biases; the tables widen when a row brings more than they hold."""
        self._widen(
            suppress=max(len(new.sampling.suppress) for new in new_rows),
            bias=max(len(new.sampling.logit_bias) for new in new_rows),
        )
        tables = self.sampling
        count = len(new_rows)
        suppress = np.full((count, tables.suppress_ids.shape[1]), -1, dtype=np.int64)
        bias_ids = np.full((count, tables.bias_ids.shape[1]), -1, dtype=np.int64)
        bias_values = np.zeros(bias_ids.shape, dtype=np.float32)
        for index, new in enumerate(new_rows):
            suppress[index, : len(new.sampling.suppress)] = new.sampling.suppress
            bias = new.sampling.logit_bias
            bias_ids[index, : len(bias)] = list(bias)
            bias_values[index, : len(bias)] = list(bias.values())
        rows = np.array([new.row for new in new_rows], dtype=np.int64)
        at, *values = stage([rows, suppress, bias_ids, bias_values], self.device)
        targets = (tables.suppress_ids, tables.bias_ids, tables.bias_values)
        for target, value in zip(targets, values, strict=True):
            target.index_copy_(0, at, value)

    def _widen(self, *, suppress: int, bias: int) -> None:
        tables = self.sampling
        self.sampling = replace(
            tables,
            suppress_ids=_at_least(tables.suppress_ids, suppress, -1),
            bias_ids=_at_least(tables.bias_ids, bias, -1),
            bias_values=_at_least(tables.bias_values, bias, 0),
        )

    def _write_mirrors(self, new_rows: Sequence[NewRow]) -> None:
        for new in new_rows:
            of_prompt = new.sampling.prompt_logprobs
            self.prompt_len_of_row[new.row] = new.prompt_len
            self.method_of_row[new.row] = self._method_index[new.method]
            self.prompt_logprobs_of_row[new.row] = -1 if of_prompt is None else of_prompt
            self._demands[new.row] = _demands_of(new)
            self.pages.forget(new.row)
        if self.pooled is not None:
            self.pooled.admit(new_rows)


def _at_least(table: torch.Tensor, slots: int, fill: int) -> torch.Tensor:
    """`table` [R, E] itself, or a copy of at least twice the slots when `slots` exceed E."""
    rows, held = table.shape
    if slots <= held:
        return table
    wider = table.new_full((rows, max(slots, 2 * held)), fill)
    wider[:, :held] = table
    return wider

"""A model and an executor small enough to reason about: float64, paged, no engine code in between.

ToyModel is a two-layer transformer whose unwritten KV is NaN. ToyExecutor runs step plans with the
real strategies and the real sampler; the model, its cache and the row tables are toys.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch

from engine_service.core.params import MAX_LISTED_IDS
from engine_service.core.step import (
    Decision,
    Decisions,
    NewRow,
    Span,
    StepPlan,
    TokenLogprobs,
    granularity,
)
from engine_service.core.strategy import DecodeStrategy, ExecutorLimits
from engine_service.sampling.batch import DecideBatch, DecideResult, Wants
from engine_service.sampling.head import KnownLogits
from engine_service.sampling.logprobs import score_tokens
from engine_service.sampling.masks import masked_logits
from engine_service.sampling.rng import request_seed
from engine_service.sampling.tables import SamplingTables

VOCAB = 40
MASK = 39
"""The toy's mask token; also an ordinary token when it stands in a prompt."""

LONGEST = 512
"""Positions that a toy knows."""

WHOLE = ("prompt_lens", "top_k", "seeds", "min_tokens")
REAL = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
"""Columns of SamplingTables with one number per row."""


class ToyModel:
    """Two layers, width 32. Logits are peaked (x6), so that thresholds fire none, some or all."""

    def __init__(self, seed: int = 0, *, width: int = 32, heads: int = 2, layers: int = 2) -> None:
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        self.width, self.heads, self.num_layers = width, heads, layers
        self.embedding = draw(VOCAB, width)
        names = {"q": 1, "k": 1, "v": 1, "o": 1}
        self.layers = [
            {name: draw(width, width) / math.sqrt(width) for name in names}
            | {"up": draw(4 * width, width) / math.sqrt(width)}
            | {"down": draw(width, 4 * width) / math.sqrt(4 * width)}
            for _ in range(layers)
        ]
        self.head = draw(VOCAB, width) / math.sqrt(width) * 6
        self.position_codes = self._position_code(torch.arange(LONGEST))

    def new_cache(self, num_slots: int) -> torch.Tensor:
        """[layers, 2, slots, width], all NaN: reading what nobody wrote shows in every logit."""
        shape = (self.num_layers, 2, num_slots, self.width)
        return torch.full(shape, math.nan, dtype=torch.float64)

    def forward(
        self, token_ids: torch.Tensor, span: Span, slots: torch.Tensor, cache: torch.Tensor
    ) -> torch.Tensor:
        """[T, V] logits of the span's T tokens; `slots` [kv_len] is where each position lives."""
        positions = torch.arange(span.start, span.stop)
        horizon = ((positions // span.mask_block + 1) * span.mask_block).clamp(max=span.kv_len)
        visible = torch.arange(span.kv_len)[None] < horizon[:, None]
        x = self.embedding[token_ids] + self.position_codes[positions]
        stored = positions >= span.store_from
        own = slots[span.start : span.stop][stored]
        for index, layer in enumerate(self.layers):
            n = self._normalize(x)
            for part, name in enumerate("kv"):
                cache[index, part, own] = (n @ layer[name].T)[stored]
            k, v = self._split(cache[index, 0, slots]), self._split(cache[index, 1, slots])
            scores = self._split(n @ layer["q"].T) @ k.transpose(1, 2)
            scores = scores / math.sqrt(self.width / self.heads)
            weights = scores.masked_fill(~visible[None], -math.inf).softmax(-1)
            v = v.masked_fill(~visible.any(0)[None, :, None], 0.0)
            mixed = (weights @ v).transpose(0, 1).reshape(len(x), -1)
            x = x + mixed @ layer["o"].T
            x = x + torch.relu(self._normalize(x) @ layer["up"].T) @ layer["down"].T
        return x @ self.head.T

    def dense(self, token_ids: Sequence[int], mask_block: int) -> torch.Tensor:
        """[L, V] logits of a whole sequence, computed at once without any cache."""
        length = len(token_ids)
        span = Span(0, 0, length, length, mask_block, 0, 0)
        return self.forward(
            torch.tensor(token_ids), span, torch.arange(length), self.new_cache(length)
        )

    def _split(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(len(x), self.heads, -1).transpose(0, 1)

    def _normalize(self, x: torch.Tensor) -> torch.Tensor:
        return x * (math.sqrt(self.width) / torch.linalg.vector_norm(x, dim=-1, keepdim=True))

    def _position_code(self, positions: torch.Tensor) -> torch.Tensor:
        rates = torch.exp(-torch.arange(0, self.width, 2, dtype=torch.float64) / self.width * 5)
        angles = positions[:, None].double() * rates
        return torch.cat([angles.sin(), angles.cos()], -1)


class ToyTables:
    """The device tables, filled row by row in plain loops, and each row's page list."""

    def __init__(self, max_rows: int, width: int, mask_token_id: int | None) -> None:
        rows = max_rows + 1
        self.rows: dict[int, NewRow] = {}
        self.pages: dict[int, list[int]] = {}
        self.fill = mask_token_id or 0
        whole = {name: torch.zeros(rows, dtype=torch.int64) for name in WHOLE}
        real = {name: torch.zeros(rows, dtype=torch.float32) for name in REAL}
        self.sampling = SamplingTables(
            tokens=torch.full((rows, width), self.fill),
            fixed=torch.zeros(rows, width, dtype=torch.bool),
            suppress_ids=torch.full((rows, MAX_LISTED_IDS), -1),
            bias_ids=torch.full((rows, MAX_LISTED_IDS), -1),
            bias_values=torch.zeros(rows, MAX_LISTED_IDS),
            banned_ids=torch.tensor([] if mask_token_id is None else [mask_token_id]).long(),
            masks=torch.full((rows, -(-VOCAB // 32)), -1, dtype=torch.int32),
            **whole,
            **real,
        )

    def apply(self, plan: StepPlan) -> None:
        """Takes new rows and pages over."""
        for new in plan.new_rows:
            self.rows[new.row], self.pages[new.row] = new, []
            self._write(new)
        for one in plan.masks:
            self._write_mask(one.row, one.mask)
        for append in plan.page_appends:
            assert append.index == len(self.pages[append.row]), "pages are appended in order"
            self.pages[append.row] += append.pages

    def wants(self, rows: Sequence[int]) -> Wants:
        """What any of these rows needs."""
        asked = [self.rows[row].sampling for row in rows]
        alternatives = [a.logprobs for a in asked if a.logprobs is not None]
        return Wants(
            sampling=any(a.temperature > 0 for a in asked),
            filters=any(a.top_k or a.top_p < 1 or a.min_p for a in asked),
            penalties=any(
                a.repetition_penalty != 1 or a.presence_penalty or a.frequency_penalty
                for a in asked
            ),
            bias=any(a.logit_bias for a in asked),
            suppress=any(a.suppress for a in asked),
            mask=bool((self.masks[rows] != -1).any()),
            max_logprobs=max(alternatives, default=None),
            holds_ends=any(getattr(self.rows[row].params, "eos_last", False) for row in rows),
        )

    @property
    def masks(self) -> torch.Tensor:
        assert self.sampling.masks is not None
        return self.sampling.masks

    def _write_mask(self, row: int, mask: bytes) -> None:
        self.masks[row] = torch.frombuffer(bytearray(mask), dtype=torch.int32)

    def _write(self, new: NewRow) -> None:
        self.masks[new.row] = -1
        if new.mask is not None:
            self._write_mask(new.row, new.mask)
        tables, row, asked = self.sampling, new.row, new.sampling
        num_committed = len(new.token_ids)
        tokens = [*new.token_ids, *new.canvas.token_ids]
        tables.tokens[row] = self.fill
        tables.tokens[row, : len(tokens)] = torch.tensor(tokens)
        tables.fixed[row] = False
        tables.fixed[row, :num_committed] = True
        tables.fixed[row, num_committed : len(tokens)] = torch.tensor(new.canvas.fixed).bool()
        for position, token in new.pinned:
            tables.tokens[row, position], tables.fixed[row, position] = token, True
        tables.prompt_lens[row] = new.prompt_len
        tables.seeds[row] = request_seed(asked.seed, asked.choice)
        for name in ("top_k", "min_tokens", *REAL):
            getattr(tables, name)[row] = getattr(asked, name)
        tables.suppress_ids[row] = -1
        tables.suppress_ids[row, : len(asked.suppress)] = torch.tensor(asked.suppress).long()
        tables.bias_ids[row] = -1
        tables.bias_ids[row, : len(asked.logit_bias)] = torch.tensor(list(asked.logit_bias)).long()
        values = list(asked.logit_bias.values())
        tables.bias_values[row, : len(values)] = torch.tensor(values)


@dataclass
class ToyExecutor:
    """core.strategy.Executor on a ToyModel. `shifts` is logits_shift by method (default 0)."""

    model: ToyModel
    strategies: dict[str, DecodeStrategy]
    limits: ExecutorLimits
    mask_token_id: int | None = MASK
    shifts: dict[str, int] | None = None
    depth: int = 0

    def __post_init__(self) -> None:
        num_pages, page_size, max_rows, max_model_len = self.limits
        blocks = [granularity(s.mask_block) for s in self.strategies.values()]
        unit = math.lcm(page_size, *blocks)
        width = -(-max_model_len // unit) * unit
        self.tables = ToyTables(max_rows, width, self.mask_token_id)
        self.cache = self.model.new_cache(num_pages * page_size)
        self.num_query_tokens = self.num_steps = 0
        for strategy in self.strategies.values():
            strategy.bind(max_rows, torch.device("cpu"))

    def launch(self, plan: StepPlan) -> Any:
        """Runs the step at once; the handle is its result."""
        self._apply(plan)
        logits = [self._forward(span) for span in plan.spans]
        decisions: list[Decision | None] = [None] * len(plan.spans)
        for method, strategy in self.strategies.items():
            chosen = [
                index
                for index, span in enumerate(plan.spans)
                if self._method(span) == method and span.decide_stop > span.decide_start
            ]
            if chosen:
                self._decide(strategy, plan.spans, chosen, logits, decisions)
        for index, span in enumerate(plan.spans):
            if span.score_stop > span.score_start:
                decision = decisions[index] or Decision([], [])
                scores = self._score(span, logits[index])
                decisions[index] = decision._replace(scores=scores)
        self.num_steps += 1
        self.num_query_tokens += sum(span.num_tokens for span in plan.spans)
        return Decisions.split(plan, decisions)

    def collect(self, handle: Any) -> Decisions:
        """What `launch` computed."""
        return handle

    def _method(self, span: Span) -> str:
        return self.tables.rows[span.row].method

    def _shift(self, span: Span) -> int:
        shifts = {"autoregressive": 1} if self.shifts is None else self.shifts
        return shifts.get(self._method(span), 0)

    def _apply(self, plan: StepPlan) -> None:
        self.tables.apply(plan)
        for method, strategy in self.strategies.items():
            rows = [new for new in plan.new_rows if new.method == method]
            if rows:
                strategy.admit(rows)
        starts = {span.row: span.start for span in plan.spans}
        page_size = self.limits.page_size
        for append in plan.page_appends:
            for index, page in enumerate(append.pages, append.index):
                if index * page_size >= starts[append.row]:
                    self.cache[:, :, page * page_size : (page + 1) * page_size] = math.nan

    def _forward(self, span: Span) -> torch.Tensor:
        assert span.start < span.stop, f"empty span {span}"
        assert not span.kept, "a toy keeps all keys or none"
        if span.aside:
            assert span.aside == 1, "a toy is not guided"
            alone = span._replace(kv_len=span.stop)
            token_ids = self.tables.sampling.tokens[span.row, : span.stop]
            cache = self.model.new_cache(span.stop)
            return self.model.forward(token_ids, alone, torch.arange(span.stop), cache)
        page_size, pages = self.limits.page_size, self.tables.pages[span.row]
        assert span.kv_len <= len(pages) * page_size, f"{span} reaches beyond its pages"
        slots = torch.tensor(
            [pages[p // page_size] * page_size + p % page_size for p in range(span.kv_len)]
        )
        token_ids = self.tables.sampling.tokens[span.row, span.start : span.stop]
        return self.model.forward(token_ids, span, slots, self.cache)

    def _decide(
        self,
        strategy: DecodeStrategy,
        spans: Sequence[Span],
        chosen: Sequence[int],
        logits: Sequence[torch.Tensor],
        decisions: list[Decision | None],
    ) -> None:
        picked = [spans[index] for index in chosen]
        counts = [span.decide_stop - span.decide_start for span in picked]
        rows = torch.tensor([span.row for span in picked])
        wanted = [
            logits[index][
                span.decide_start - self._shift(span) - span.start : span.decide_stop
                - self._shift(span)
                - span.start
            ]
            for index, span in zip(chosen, picked, strict=True)
        ]
        batch = DecideBatch(
            logits=ToyLogits(torch.cat(wanted)),
            rows=rows.repeat_interleave(torch.tensor(counts)),
            positions=torch.cat([torch.arange(s.decide_start, s.decide_stop) for s in picked]),
            span_rows=rows,
            cu_decide=torch.tensor([0, *accumulate(counts)]),
            tables=self.tables.sampling,
            wants=self.tables.wants(rows.tolist()),
            num_open=sum(counts) - sum(span.num_fixed for span in picked),
        )
        check_open(batch)
        assert not batch.logits_NV.isnan().any(), "KV that nobody wrote was read"
        batch = replace(batch, logits=masked_logits(batch))
        result = strategy.decide(batch)
        for index, start, count in zip(chosen, batch.cu_decide.tolist(), counts, strict=False):
            wanted = self.tables.rows[spans[index].row].sampling.logprobs
            decisions[index] = _decision(result, start, start + count, wanted)

    def _score(self, span: Span, logits: torch.Tensor) -> list[TokenLogprobs]:
        first, stop = span.score_start - 1 - span.start, span.score_stop - 1 - span.start
        token_ids = self.tables.sampling.tokens[span.row, span.score_start : span.score_stop]
        wanted = self.tables.rows[span.row].sampling.prompt_logprobs
        assert wanted is not None, "scores that nobody asked for"
        scores = score_tokens(logits[first:stop], token_ids, wanted)
        return [
            TokenLogprobs(tuple(i), tuple(p), r)
            for i, p, r in zip(
                scores.ids.tolist(), scores.logprobs.tolist(), scores.ranks.tolist(), strict=True
            )
        ]


class ToyLogits(KnownLogits):
    """As an output head's, of which some positions can be left out."""

    is_known = False


def check_open(batch: DecideBatch) -> None:
    """The bound holds: who chooses for as many positions only leaves no open one out."""
    fixed = batch.tables.fixed[batch.rows, batch.positions]
    assert batch.num_open is not None
    assert batch.num_open >= int((~fixed).sum()), "open positions that nobody would decide"


def _decision(result: DecideResult, start: int, stop: int, num_more: int | None) -> Decision:
    """One span's share; `num_more` None: the request wants no log-probabilities."""
    logprobs: list[TokenLogprobs | None] | None = None
    if num_more is not None:
        assert result.logprobs is not None
        assert result.logprob_ids is not None
        assert result.ranks is not None
        width = 1 + num_more
        logprobs = [
            TokenLogprobs(
                tuple(result.logprob_ids[i, :width].tolist()),
                tuple(result.logprobs[i, :width].tolist()),
                int(result.ranks[i]),
            )
            for i in range(start, stop)
        ]
    token_ids = result.token_ids[start:stop].tolist()
    final = result.final
    flags = [True] * len(token_ids) if final is None else final[start:stop].tolist()
    sure = None if result.confidence is None else result.confidence[start:stop].tolist()
    return Decision(token_ids, flags, logprobs, confidence=sure)

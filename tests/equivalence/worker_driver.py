"""Drives a real Worker without the core: plans by hand, pages at random, rows where they fall."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

from engine_service.config import EngineConfig
from engine_service.core.step import Decision, NewRow, PageAppend, Span, StepPlan, TokenLogprobs
from engine_service.decoding.autoregressive import Autoregressive
from engine_service.worker.worker import Worker
from tests.row_builders import make_row

MAX_LEN = 96


@dataclass
class Asked:
    """One request and what it got."""

    prompt: list[int]
    count: int
    sampling: dict[str, object] = field(default_factory=dict)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    scores: list[TokenLogprobs] = field(default_factory=list)


@dataclass
class _Live:
    """A request on its row."""

    asked: Asked
    row: int
    pages: list[int]
    num_cached: int = 0
    is_new: bool = True

    def plan(self, chunk: int) -> Span:
        end = len(self.asked.prompt) + len(self.asked.tokens)
        stop = min(end, self.num_cached + chunk)
        score_start, score_stop = self.num_cached + 1, min(len(self.asked.prompt), stop + 1)
        if self.asked.sampling.get("prompt_logprobs") is None or score_stop < score_start:
            score_start = score_stop = 0
        decide = end if stop == end else stop
        return Span(
            self.row,
            self.num_cached,
            stop,
            stop,
            1,
            decide,
            decide + (stop == end),
            score_start,
            score_stop,
        )

    def new_row(self) -> NewRow:
        tokens = [*self.asked.prompt, *self.asked.tokens]
        return make_row(self.row, tokens, prompt_len=len(self.asked.prompt), **self.asked.sampling)

    def settle(self, span: Span, decision: Decision | None) -> bool:
        """Takes a decision; True when the request is done."""
        self.num_cached = span.stop
        if decision is None:
            return False
        self.asked.scores += decision.scores or []
        self.asked.tokens += decision.token_ids
        self.asked.logprobs += decision.logprobs or []
        return len(self.asked.tokens) >= self.asked.count


def make_worker(folder: Path, **flags: object) -> Worker:
    """An autoregressive worker on the CPU."""
    settings = {"device": "cpu", "max_rows": 8, "max_model_len": MAX_LEN, **flags}
    return Worker(
        EngineConfig(model=str(folder), **settings),
        lambda traits: [Autoregressive()],
        lambda stage, done, total: None,
    )


def generate(worker: Worker, requests: list[Asked], chunk: int, rng: random.Random) -> None:
    """Runs all requests, at most max_rows at once; late ones take the rows of finished ones.

    `chunk` is the most query tokens per span. Pages are handed out one by one, in random order.
    """
    limits = worker.limits
    free_pages = rng.sample(range(limits.num_pages), limits.num_pages)
    free_rows = rng.sample(range(limits.max_rows), limits.max_rows)
    waiting, live = list(requests), list[_Live]()
    while waiting or live:
        while waiting and free_rows and rng.random() < 0.7:
            live.append(_Live(waiting.pop(0), free_rows.pop(), []))
        if not live:
            continue
        rng.shuffle(live)
        spans = [one.plan(chunk) for one in live]
        appends = []
        for one, span in zip(live, spans, strict=True):
            first = len(one.pages)
            while len(one.pages) * limits.page_size < span.kv_len:
                one.pages.append(free_pages.pop())
            if len(one.pages) > first:
                appends.append(PageAppend(one.row, first, tuple(one.pages[first:])))
        rows = tuple(one.new_row() for one in live if one.is_new)
        plan = StepPlan(seq=0, new_rows=rows, page_appends=tuple(appends), own_spans=tuple(spans))
        decisions = worker.collect(worker.launch(plan))
        for one, span, decision in zip(list(live), spans, decisions.own, strict=True):
            one.is_new = False
            if one.settle(span, decision):
                live.remove(one)
                free_rows.append(one.row)
                free_pages.extend(one.pages)

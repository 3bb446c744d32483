"""One live sequence inside the scheduler. Only the scheduler writes its fields.

It does not know the pool or the queue; its page table is a handle that PageManager fills.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from engine_service.core.blocks import Blocks
from engine_service.core.constraint import Constraint
from engine_service.core.finish import Stop
from engine_service.core.messages import Finish, FinishReason, Mark, ShownCanvas, Timings, Usage
from engine_service.core.page_table import PageTable
from engine_service.core.params import ResolvedSampling
from engine_service.core.pinning import Pinned, num_pinned_before, pin, pinned_from
from engine_service.core.step import Canvas, Decision, NewRow, Span
from engine_service.core.strategy import DecodeStrategy, View

MAX_PAUSES = 64
"""Spans of one request that a trace shows at most, for requests that are preempted for ever."""

MAX_MARKS = 60
"""Chunks, and blocks, that a trace shows of one request: readers drop what goes beyond 128."""


class Ending(NamedTuple):
    """Why a request ends. `output_tokens`: behind how many, pinned ones among them, if earlier than
    what was told of it; usage counts no others."""

    reason: FinishReason
    detail: str = ""
    stop_token_id: int | None = None
    output_tokens: int | None = None
    vector: bytes = b""


@dataclass(eq=False, slots=True, kw_only=True)
class Request:
    """What the scheduler knows of a sequence. `row` is -1 while it holds none."""

    key: int
    request_id: str
    committed: list[int]
    """Prompt and output: final tokens."""
    prompt_len: int
    canvas: Canvas
    """Tentative tail behind the committed tokens; kept on preemption."""
    strategy: DecodeStrategy
    params: Any
    sampling: ResolvedSampling
    table: PageTable
    priority: int
    fairness_key: str
    """Whose request it is, for those who share the engine."""
    arrival_ns: int
    emit_canvas: bool
    score_from: int
    """First prompt position still to be scored; prompt_len when none is."""
    max_len: int
    """Committed tokens at which it ends at the latest."""
    blocks: Blocks
    stop_ids: frozenset[int]
    """Of `sampling`; here because every token is compared with them."""
    is_plain: bool
    """Its method only appends, and only its tokens are reported."""
    only_prefills: bool = False
    """It ends when its prompt's KV is in the pages."""
    pinned: Pinned = ()
    """Tokens behind the prompt that the caller gave."""
    mask: bytes | None = None
    """Ids that it may choose, wherever it decides."""
    constraint: Constraint | None = None
    """What it may choose next depends on what it chose: it sits out steps until that is known."""
    smooth_until: int = 0
    """Committed tokens below which nothing is due but to append: no page, seal or end by length.
    0 while that is not so, or not known."""
    num_cached: int = 0
    told_len: int = 0
    """Committed tokens that were told when it was preempted and had to give some of them up."""
    row: int = -1
    decoding: bool = False
    """The span launched last decides something: the next one is short."""
    launched: Span | None = None
    """The span launched last; None without a row."""
    in_flight: int = 0
    """Launched steps that name it and are not collected yet."""
    ending: Ending | None = None
    """It is over and its caller knows; row and pages go back with the last step in flight."""
    waits_for: bytes | None = None
    """Unit digest that a running request is computing under the same key."""
    cached_tokens: int = 0
    forward_passes: int = 0
    denoise_steps: int = 0
    preemptions: int = 0
    paused_ns: int | None = None
    """When it was preempted; None while it has not been, or runs again."""
    pauses: tuple[tuple[int, int], ...] = ()
    marks: list[Mark] | None = None
    """What happened to it and when; None where nobody traces it."""
    remasks: int = 0
    cache_refreshes: int = 0
    """Of what is traced, as Finish has them."""
    started_ns: int | None = None
    first_token_ns: int | None = None

    def restart(self, now_ns: int) -> None:
        """Takes down a preemption, and goes back to where the strategy can start again."""
        kept_len, canvas = self.strategy.restart(self.view())
        canvas = pin(canvas, kept_len, self.pinned)
        self.canvas = canvas.watched() if self.emit_canvas else canvas
        if kept_len < len(self.committed):
            self.told_len = max(self.told_len, len(self.committed))
            del self.committed[kept_len:]
        self.num_cached = 0
        self.decoding = False
        self.preemptions += 1
        self.paused_ns = now_ns

    def resume(self, now_ns: int) -> None:
        """Takes down how long a preempted request waited; nothing for others."""
        if self.paused_ns is not None:
            self.pauses = (*self.pauses, (self.paused_ns, now_ns))[:MAX_PAUSES]
            self.paused_ns = None

    def mark(self, now_ns: int, span: Span, num_run: int, denoised: Canvas | None) -> None:
        """Takes down that a chunk of the prompt, or a block, is done: by the last `num_run` tokens,
        after which another block is begun, or nothing is left to do. `denoised` is the canvas ahead
        of the step, if that took a denoising step."""
        marks = self.marks
        if marks is None:
            return
        denoises = denoised is not None
        if denoised is not None:
            now = (*self.committed[len(self.committed) - num_run :], *self.canvas.token_ids)
            pairs, mask = zip(denoised.token_ids, now, strict=False), self.strategy.mask_token_id
            self.remasks += sum(before not in (mask, after) for before, after in pairs)
            self.cache_refreshes += span.is_whole and span.kv_len > 0
        stop, block_at = len(self.committed), self.blocks.at
        is_full = block_at(stop) > block_at(stop - num_run) or not self.canvas.token_ids
        is_block = denoises and num_run > 0 and is_full
        is_chunk = span.decide_stop == span.decide_start or self.strategy.append_only
        if not (is_block or (is_chunk and span.start < self.prompt_len)):
            return
        before = [mark.num_tokens for mark in marks if mark.is_block is is_block]
        if len(before) < MAX_MARKS:
            num_tokens = span.stop - span.start
            if is_block:
                num_tokens = stop - self.prompt_len - sum(before)
            marks.append(Mark(now_ns, is_block, num_tokens, self.denoise_steps))

    def look_ahead(self) -> None:
        """Finds `smooth_until` anew, whenever one of its bounds has moved."""
        if self.is_plain and self.first_token_ns is not None:
            self.smooth_until = min(self.max_len, self.table.capacity, self.table.seal_at)

    def view_ahead(self, *, foresees: bool) -> View | None:
        """The picture a strategy plans the next span from, while steps may be in flight.

        None: a decision is on its way that nobody looks beyond, or behind which nothing follows.
        `foresees` lets the strategy say what may be assumed, and not only what is certain.
        """
        span = self.launched
        if not self.in_flight or span is None:
            return self.view()
        if span.decide_stop > span.decide_start:
            if self.constraint is not None:
                return None
            ahead = self.strategy.foresee(self.view(), span, may_err=foresees)
            return None if ahead is None or ahead.committed_len >= self.max_len else ahead
        score_from = max(self.score_from, span.score_stop)
        return self.view()._replace(num_cached=span.stop, score_from=score_from)

    def view(self) -> View:
        """The picture of what is settled."""
        return View(
            self.row,
            self.prompt_len,
            len(self.committed),
            self.num_cached,
            self.canvas,
            self.params,
            self.score_from,
        )

    def shown(self) -> ShownCanvas:
        """The canvas as whoever watches is told of it, with the block that is decided next."""
        start, canvas = len(self.committed), self.canvas
        opened = start + canvas.fixed.index(False) if False in canvas.fixed else start
        return ShownCanvas(start, self.blocks.at(opened), canvas)

    def new_row(self) -> NewRow:
        """What a worker must know to take it into its row."""
        return NewRow(
            row=self.row,
            token_ids=list(self.committed),
            prompt_len=self.prompt_len,
            canvas=self.canvas,
            method=self.strategy.name,
            params=self.params,
            sampling=self.sampling,
            pinned=pinned_from(self.pinned, len(self.committed) + len(self.canvas.token_ids)),
            mask=self.mask,
        )

    def ends_by(self, stop: Stop | None, decision: Decision | None) -> Ending | None:
        """What a step that is settled ends it by: a stop that was found, its vector, or all of its
        prompt where no more is wanted."""
        if stop is not None:
            return Ending(stop.reason, stop.detail, stop.stop_token_id)
        if decision is not None and decision.vector is not None:
            return Ending(FinishReason.STOP, vector=decision.vector)
        if self.only_prefills and self.num_cached >= self.prompt_len:
            return Ending(FinishReason.LENGTH)
        return None

    def finish(self, ending: Ending, now_ns: int) -> Finish:
        """The terminal event, with what the request used."""
        started = now_ns if self.started_ns is None else self.started_ns
        first_token = now_ns if self.first_token_ns is None else self.first_token_ns
        told_len = max(self.told_len, len(self.committed))
        if ending.output_tokens is not None:
            told_len = min(told_len, self.prompt_len + ending.output_tokens)
        output_tokens = told_len - self.prompt_len - num_pinned_before(self.pinned, told_len)
        usage = Usage(
            prompt_tokens=self.prompt_len,
            cached_tokens=self.cached_tokens,
            output_tokens=output_tokens,
            forward_passes=self.forward_passes,
            denoise_steps=self.denoise_steps,
            preemptions=self.preemptions,
        )
        timings = Timings(
            arrival_ns=self.arrival_ns,
            queue_ns=max(0, started - self.arrival_ns),
            prefill_ns=first_token - started,
            decode_ns=now_ns - first_token,
        )
        self.resume(now_ns)
        return Finish(
            ending.reason,
            ending.stop_token_id,
            ending.detail,
            usage,
            timings,
            self.pauses,
            ending.vector,
            tuple(self.marks or ()),
            self.remasks,
            self.cache_refreshes,
            self.blocks.num_generated(
                self.prompt_len, output_tokens, [position for position, _ in self.pinned]
            ),
        )

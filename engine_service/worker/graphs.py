"""CUDA graphs of whole steps, from the embedding to the decided token, one per bucket of sizes; of
stages of a pipeline, those of their layers.

A step that fits a bucket is padded to it, its arrays are copied to where the graph reads them, and
the graph is replayed: one launch instead of hundreds. It does not know requests or methods.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import NamedTuple, TypeVar

import torch

from engine_service.core.step import Span
from engine_service.launching import launch_bound
from engine_service.out_of_memory import is_out_of_memory
from engine_service.sampling.batch import DecideResult, Wants
from engine_service.staging import Arena
from engine_service.worker.batch import DecidePart, bind_batch, columns_of
from engine_service.worker.buckets import (
    PLAIN,
    Bucket,
    captured_choice,
    captured_choices,
    find_bucket,
    find_forward_bucket,
)
from engine_service.worker.checkpoint import Report
from engine_service.worker.layout import StepLayout, lay_out
from engine_service.worker.padding import pad, pad_forward, padding_forward
from engine_service.worker.program import States, StepProgram

_LOG = logging.getLogger("tidemill.rank")

_Made = TypeVar("_Made")

_MANY_FINAL = 64
"""Decided positions that are final, from which on the decision is launched behind the graph, with a
head over the open ones alone. Open ones are counted by as many: fewer final ones leave nothing out.
Launching it takes the host half a millisecond, while the device computes what is ahead of it."""


class _Whole(NamedTuple):
    """A graph with its own decision."""

    graph: torch.cuda.CUDAGraph
    result: DecideResult
    """What every replay overwrites."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Captured:
    """A bucket's graphs: with a decision of their own, and up to the states any is made from."""

    wholes: dict[Wants, _Whole]
    """By what their rows may want."""
    to_states: torch.cuda.CUDAGraph
    states: States
    part: DecidePart


class StepGraphs:
    """Captures every bucket at construction; `run` and `forward` replay one. Single stream, like
    the runner."""

    def __init__(
        self, program: StepProgram, buckets: Sequence[Bucket], logit_chunk: int, report: Report
    ) -> None:
        """`report("graphs", done, total)` counts graphs. Largest first, so that the memory pool
        which all of them share grows once. At most `logit_chunk` rows of logits exist at once."""
        self._program = program
        self._buckets = buckets
        self._logit_chunk = logit_chunk
        device = program.tables.device
        templates = {
            (bucket, method): self._template(bucket, method)
            for bucket in reversed(buckets)
            for method in (range(len(program.strategies)) if bucket.decided else (None,))
        }
        sizes = [Arena.size_of(columns_of(template)) for template in templates.values()]
        self._arena = Arena(max(sizes), device)
        self._pool = torch.cuda.graph_pool_handle()
        rows = max(bucket.decided or bucket.tokens for bucket in buckets)
        shape, width = program.backend.shape, program.model.traits.hidden_size
        self._most_launched = launch_bound(width)
        self._hidden = torch.zeros(rows, width, dtype=shape.dtype, device=device)
        """Where graphs leave hidden states for what follows them, and those of a later stage find
        what the one ahead has passed on."""
        decided = max(bucket.decided for bucket in buckets)
        self._states = States(self._hidden, self._hidden.new_zeros(decided, shape.width))
        """Where they leave those of decisions, which the last layer may still have to end for."""
        self._captured: dict[tuple[Bucket, int], _Captured] = {}
        self._forwards: dict[Bucket, torch.cuda.CUDAGraph] = {}
        for done, ((bucket, method), template) in enumerate(templates.items()):
            report("graphs", done, len(templates))
            if method is None:
                self._forwards[bucket] = self._capture_forward(template)
            else:
                self._captured[bucket, method] = self._capture(template, self._choices(bucket))
        torch.cuda.synchronize(device)

    def close(self) -> None:
        """Gives up all graphs: whoever communicates in one cannot take leave before."""
        torch.cuda.synchronize(self._hidden.device)
        for captured in self._captured.values():
            for whole in captured.wholes.values():
                whole.graph.reset()
            captured.to_states.reset()
        for forward in self._forwards.values():
            forward.reset()

    def has_room(self, layout: StepLayout) -> bool:
        """Whether a step's forward at least is captured."""
        return (find_bucket(layout, self._buckets) or self._find_forward(layout)) is not None

    def run(self, layout: StepLayout) -> DecideResult | None:
        """Replays the step's graph; None where no bucket has room. Never waits."""
        bucket = find_bucket(layout, self._buckets)
        if bucket is None:
            return None
        (wanted,) = layout.decides
        if not wanted.wants.is_plain and bucket.decided > self._logit_chunk:
            return None
        num_final = len(wanted.positions) - wanted.num_open
        captured = self._captured[bucket, wanted.method]
        padded = pad(layout, bucket, self._program.tables)
        self._arena.put(columns_of(padded))
        choice = captured_choice(wanted.wants, captured.wholes)
        if choice is not None and num_final < _MANY_FINAL:
            whole = captured.wholes[choice]
            whole.graph.replay()
            return whole.result
        captured.to_states.replay()
        part = replace(captured.part, layout=padded.decides[0])
        return self._program.decide(part, self._program.logits_of(captured.states))

    def forward(self, layout: StepLayout) -> torch.Tensor | None:
        """[T, E] hidden states of a step whose decision no graph has, to be read before the next
        replay, and passed on; None where no bucket has room. Never waits for the host."""
        bucket = self._find_forward(layout)
        if bucket is None:
            return None
        program, num_tokens = self._program, len(layout.places)
        self._arena.put(columns_of(pad_forward(layout, bucket, program.tables)))
        hidden = self._hidden[:num_tokens]
        if not program.stage.is_first:
            # What pads would grow with every step that it is added to.
            self._hidden[num_tokens : bucket.tokens].zero_()
            program.receive(hidden)
        self._forwards[bucket].replay()
        if not program.stage.is_last:
            # The next step overwrites them, and those behind may take them later.
            program.pass_on(hidden.clone())
        return hidden

    def _find_forward(self, layout: StepLayout) -> Bucket | None:
        return find_forward_bucket(layout, self._buckets, self._most_launched)

    def _choices(self, bucket: Bucket) -> tuple[Wants, ...]:
        """What its whole graphs decide for."""
        is_whole = self._program.model.vocab_share is None
        return captured_choices(bucket, logit_chunk=self._logit_chunk, has_whole_head=is_whole)

    def _template(self, bucket: Bucket, method: int | None) -> StepLayout:
        """A step of padding alone; None: that decides nothing."""
        tables = self._program.tables
        if method is None:
            return padding_forward(bucket, tables)
        layout = lay_out(
            [Span(tables.trash_row, 0, 1, 1, 1, 1, 2)], tables, logits_shift=1, logit_chunk=1
        )
        size = bucket.decided
        part = replace(layout.decides[0], method=method, wants=PLAIN, num_open=size)
        return pad(replace(layout, decides=(part,)), bucket, tables)

    @torch.inference_mode()
    def _capture(self, template: StepLayout, choices: Sequence[Wants]) -> _Captured:
        columns = columns_of(template)
        self._arena.put(columns)
        program, windows = self._program, self._arena.windows(columns)

        def forward() -> tuple[DecidePart, States]:
            batch = bind_batch(template, windows, program.tables)
            (part,) = batch.decides
            return part, program.states(batch)

        def decided(choice: Wants) -> DecideResult:
            part, states = forward()
            part = replace(part, layout=replace(part.layout, wants=choice))
            return program.decide(part, program.logits(part, states))

        def to_states() -> tuple[DecidePart, States]:
            part, states = forward()
            return part, states.at(part.queries, out=self._states)

        wholes = {choice: _Whole(*self._record(partial(decided, choice))) for choice in choices}
        short, (part, states) = self._record(to_states)
        return _Captured(wholes=wholes, to_states=short, states=states, part=part)

    @torch.inference_mode()
    def _capture_forward(self, template: StepLayout) -> torch.cuda.CUDAGraph:
        columns = columns_of(template)
        self._arena.put(columns)
        program, windows = self._program, self._arena.windows(columns)
        entered = None if program.stage.is_first else self._hidden[: len(template.places)]

        def forward() -> None:
            # All of them: decisions that the graph does not know follow it.
            batch = bind_batch(template, windows, program.tables)
            hidden = program.compute(batch, program.embed(batch) if entered is None else entered)
            if hidden is not entered:
                self._hidden[: len(hidden)].copy_(hidden)

        graph, _ = self._record(forward)
        return graph

    @cached_property
    def _side(self) -> torch.cuda.Stream:
        """One for all: a library's workspace stays with every stream that it has run on."""
        return torch.cuda.Stream()

    def _record(self, work: Callable[[], _Made]) -> tuple[torch.cuda.CUDAGraph, _Made]:
        """Runs `work` once, so that kernels are compiled and libraries have their workspaces, and
        then while a graph is captured; returns what the graph will fill."""
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            work()
        torch.cuda.current_stream().wait_stream(self._side)
        graph = torch.cuda.CUDAGraph()
        # On its own stream: torch's is of the device on which a process captures first.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._side, capture_error_mode="thread_local"
        ):
            made = work()
        return graph, made


def capture_steps(
    program: StepProgram,
    buckets: Sequence[Bucket],
    logit_chunk: int,
    report: Report,
    *,
    is_alone: bool = True,
) -> StepGraphs | None:
    """`StepGraphs`, or None with one warning where memory runs out: steps then run eagerly, in the
    memory that was set aside for them. A rank that is not alone raises instead: the others' graphs
    add up padded steps, and they would wait for ever for one that runs its own as they are; and
    stages that have graphs cut some steps in two (`Runner._shares`)."""
    device = program.tables.device
    stream = torch.cuda.current_stream(device)
    before, began = torch.cuda.memory_reserved(device), time.monotonic()
    try:
        graphs = StepGraphs(program, buckets, logit_chunk, report)
    except Exception as error:
        if not is_alone or not is_out_of_memory(error):
            raise
    else:
        _LOG.info(
            "captured %d steps of up to %d tokens in %.1f s, %d MiB",
            len(buckets),
            buckets[-1].tokens,
            time.monotonic() - began,
            (torch.cuda.memory_reserved(device) - before) >> 20,
        )
        return graphs
    # A capture that could not be ended leaves its stream behind.
    torch.cuda.set_stream(stream)
    gc.collect()
    torch.cuda.empty_cache()
    _LOG.warning(
        "no memory for CUDA graphs of %d steps: every kernel is launched by itself and short steps"
        " take longer; pass less --memory-fraction, --num-pages or --max-rows",
        len(buckets),
    )
    return None

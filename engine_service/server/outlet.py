"""Where the output of one stream waits for its writer: bounded by live requests, not by time.

While a write is pending, new tokens are merged into one slot per handle. It does not know gRPC.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from engine_service.core.messages import Finish, Load, ShownCanvas
from engine_service.core.step import TokenLogprobs
from engine_service.server.state import EngineState
from tidemill.runtime.errors import ServiceError

TOKEN_BYTES = 4


class StepRows(NamedTuple):
    """One or more engine steps for one stream, in columns; sparse tables name rows by index."""

    seq: int
    handles: list[int]
    counts: list[int]
    token_ids: bytes
    logprobs: list[tuple[int, list[TokenLogprobs | None]]]
    prompt_logprobs: list[tuple[int, int, list[TokenLogprobs]]]
    finished: list[tuple[int, Finish]]
    canvas: list[tuple[int, ShownCanvas]]
    opened: Sequence[tuple[int, int]] = ()


class Failure(NamedTuple):
    """A request ended without a Finish."""

    handle: int
    error: ServiceError


class Pong(NamedTuple):
    nonce: int


class LoadReport(NamedTuple):
    load: Load
    engine_silence_ms: int
    stalled: bool = False
    state: EngineState = EngineState.READY
    memory_used: int = 0
    memory_total: int = 0
    submits: int = 0
    """Of the session, that `load` has."""
    paused: bool = False


class Draining(NamedTuple):
    deadline_ms: int


Notice = Failure | Pong | LoadReport | Draining
Item = StepRows | Notice


class _Slot:
    """What one handle has to say that is not written yet."""

    __slots__ = ("cached", "canvas", "finish", "logprobs", "prompt_logprobs", "tokens")

    def __init__(self) -> None:
        self.tokens = bytearray()
        self.logprobs: list[TokenLogprobs | None] = []
        self.prompt_logprobs: list[tuple[int, list[TokenLogprobs]]] = []
        self.finish: Finish | None = None
        self.canvas: ShownCanvas | None = None
        self.cached: int | None = None


class Outlet:
    """One writer calls `take`; the core's outputs come in through `put`. Never blocks."""

    def __init__(self) -> None:
        self._step: StepRows | None = None
        self._slots: dict[int, _Slot] = {}
        self._seq = 0
        self._notices: list[Notice] = []
        self._wake = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self.closed = False
        self.error: ServiceError | None = None

    def __len__(self) -> int:
        """Things that wait to be written: one per handle, and the notices."""
        rows = len(self._step.handles) if self._step else len(self._slots)
        return rows + len(self._notices)

    def put(self, rows: StepRows) -> None:
        """A lone step waits as it is; a second one is merged with it, slot by slot."""
        if self._step is None and not self._slots:
            self._step = rows
        else:
            if self._step is not None:
                self._merge(self._step)
                self._step = None
            self._merge(rows)
        self._wake.set()

    def notify(self, notice: Notice) -> None:
        """Queues a notice; only the newest LoadReport and Draining are kept."""
        if isinstance(notice, LoadReport | Draining):
            self._notices = [old for old in self._notices if type(old) is not type(notice)]
        self._notices.append(notice)
        self._wake.set()

    def close(self, error: ServiceError | None = None) -> None:
        """The writer ends when everything is written; `error` is the stream's status."""
        if not self.closed:
            self.closed, self.error = True, error
            self._wake.set()

    async def take(self) -> list[Item]:
        """Everything that waits; empty exactly when the outlet is closed and drained."""
        await self._wake.wait()
        items: list[Item] = []
        if self._slots:
            items.append(self._unload())
        elif self._step is not None:
            items.append(self._step)
        items += self._notices
        self._step, self._slots, self._notices = None, {}, []
        self._room.set()
        if not self.closed:
            self._wake.clear()
        return items

    async def room(self, bound: int) -> None:
        """Waits until fewer than `bound` things wait: who does not read may not submit."""
        while len(self) >= bound:
            self._room.clear()
            await self._room.wait()

    def _merge(self, rows: StepRows) -> None:
        self._seq = rows.seq
        slots, handles = self._slots, rows.handles
        offset = 0
        for handle, count in zip(handles, rows.counts, strict=True):
            slot = slots.get(handle)
            if slot is None:
                slot = slots[handle] = _Slot()
            stop = offset + count * TOKEN_BYTES
            slot.canvas = None if count else slot.canvas
            slot.tokens += rows.token_ids[offset:stop]
            offset = stop
        for row, entries in rows.logprobs:
            slots[handles[row]].logprobs += entries
        for row, start, scores in rows.prompt_logprobs:
            slots[handles[row]].prompt_logprobs.append((start, scores))
        for row, finish in rows.finished:
            slots[handles[row]].finish = finish
        for row, shown in rows.canvas:
            slots[handles[row]].canvas = shown
        for row, cached in rows.opened:
            slots[handles[row]].cached = cached

    def _unload(self) -> StepRows:
        slots = list(self._slots.values())
        return StepRows(
            seq=self._seq,
            handles=list(self._slots),
            counts=[len(slot.tokens) // TOKEN_BYTES for slot in slots],
            token_ids=b"".join([slot.tokens for slot in slots]),
            logprobs=[(row, slot.logprobs) for row, slot in enumerate(slots) if slot.logprobs],
            prompt_logprobs=[
                (row, *scores) for row, slot in enumerate(slots) for scores in slot.prompt_logprobs
            ],
            finished=[(row, slot.finish) for row, slot in enumerate(slots) if slot.finish],
            canvas=[(row, slot.canvas) for row, slot in enumerate(slots) if slot.canvas],
            opened=[(r, slot.cached) for r, slot in enumerate(slots) if slot.cached is not None],
        )


def halves(rows: StepRows) -> tuple[StepRows, StepRows]:
    """Cuts a step that is too large for one message: between rows, or inside the only row.

    A finish stays with the last tokens of its row, and scores of the prompt go before any token:
    readers may take a row's first token for the sign that its prompt is scored.
    """
    if len(rows.handles) == 1:
        return _halves_of_row(rows)
    cut = len(rows.handles) // 2
    byte = sum(rows.counts[:cut]) * TOKEN_BYTES
    first = rows._replace(
        handles=rows.handles[:cut],
        counts=rows.counts[:cut],
        token_ids=rows.token_ids[:byte],
        logprobs=[entry for entry in rows.logprobs if entry[0] < cut],
        prompt_logprobs=[entry for entry in rows.prompt_logprobs if entry[0] < cut],
        finished=[entry for entry in rows.finished if entry[0] < cut],
        canvas=[entry for entry in rows.canvas if entry[0] < cut],
        opened=[entry for entry in rows.opened if entry[0] < cut],
    )
    second = rows._replace(
        handles=rows.handles[cut:],
        counts=rows.counts[cut:],
        token_ids=rows.token_ids[byte:],
        logprobs=[(row - cut, entry) for row, entry in rows.logprobs if row >= cut],
        prompt_logprobs=[(r - cut, at, entry) for r, at, entry in rows.prompt_logprobs if r >= cut],
        finished=[(row - cut, entry) for row, entry in rows.finished if row >= cut],
        canvas=[(row - cut, shown) for row, shown in rows.canvas if row >= cut],
        opened=[(row - cut, cached) for row, cached in rows.opened if row >= cut],
    )
    return first, second


def _halves_of_row(rows: StepRows) -> tuple[StepRows, StepRows]:
    entries = rows.logprobs[0][1] if rows.logprobs else []
    scores = [(at + i, one) for _, at, run in rows.prompt_logprobs for i, one in enumerate(run)]
    half = (len(scores) + 1) // 2
    cut = 0 if len(scores) > 1 else rows.counts[0] // 2
    first = rows._replace(
        counts=[cut],
        token_ids=rows.token_ids[: cut * TOKEN_BYTES],
        logprobs=[(0, entries[:cut])] if entries and cut else [],
        prompt_logprobs=[(0, scores[0][0], [one for _, one in scores[:half]])] if half else [],
        finished=[],
        canvas=[],
    )
    second = rows._replace(
        counts=[rows.counts[0] - cut],
        token_ids=rows.token_ids[cut * TOKEN_BYTES :],
        logprobs=[(0, entries[cut:])] if entries else [],
        prompt_logprobs=[(0, scores[half][0], [o for _, o in scores[half:]])]
        if len(scores) > half
        else [],
        opened=(),
    )
    return first, second

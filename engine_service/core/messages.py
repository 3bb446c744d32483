"""What crosses the pipe between the engine server and the core. Picklable plain values.

Keys are unique integers that the server gives to every sequence; the core never sees sessions,
handles or streams. Times are CLOCK_MONOTONIC nanoseconds, one clock for all processes of a host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from engine_service.core.control import Answer, Ask
from engine_service.core.facts import EngineFacts
from engine_service.core.handoff import KvSource
from engine_service.core.journal import KvEvents
from engine_service.core.params import (
    ConstraintSpec,
    DecodingChoice,
    PoolChoice,
    SamplingParams,
)
from engine_service.core.step import Canvas, Memory, TokenLogprobs
from tidemill.runtime.errors import ServiceError


class FinishReason(IntEnum):
    """Numbers equal those of tidemill.v1.FinishReason, but for what that tells as an ERROR."""

    STOP_TOKEN = 1
    STOP_SEQUENCE = 2
    STOP_STRING = 3
    LENGTH = 4
    ABORTED = 5
    DEADLINE = 6
    ERROR = 7
    DEAD_END = 8
    """Nothing that the request allows can follow what it has. On the wire an ERROR, with
    `dead_end`: frontends that are older know no such reason."""
    STOP = 9
    """It has the vector that was asked for. Not on the wire: a PoolResponse has no reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    """A sequence to generate. `deadline_ns` and `arrival_ns` are monotonic."""

    key: int
    request_id: str
    prompt: bytes
    """Little-endian uint32 token ids."""
    sampling: SamplingParams
    decoding: DecodingChoice
    choice: int = 0
    cache_salt: str = ""
    priority: int = 0
    fairness_key: str = ""
    arrival_ns: int = 0
    deadline_ns: int | None = None
    emit_canvas: bool = False
    pinned: tuple[tuple[int, int], ...] = ()
    """Tokens that are given behind the prompt: (absolute position, token id)."""
    pool: PoolChoice | None = None
    """Nothing is generated: the prompt's hidden states are wanted."""
    constraint: ConstraintSpec | None = None
    only_prefills: bool = False
    """It ends when its prompt's KV is in the pages, or with its first token."""
    kv_source: KvSource | None = None
    """Whom the server asks for the prompt's pages before it hands the sequence on; the core never
    sees it."""
    traced: bool = False
    """Somebody watches it: its phases are taken down, and with SetTracing its steps too."""


class Abort(NamedTuple):
    """Ends a sequence early; unknown keys are ignored.

    With reason STOP_STRING, `completion_tokens` is where the text ends.
    """

    key: int
    reason: FinishReason = FinishReason.ABORTED
    completion_tokens: int | None = None
    detail: str = ""


class Shutdown(NamedTuple):
    """The core finishes the step in flight and leaves its loop."""


class SetTracing(NamedTuple):
    """Which steps are told of as StepTrace."""

    members: bool
    """Those that a traced sequence is part of."""
    every: int
    """And every so manieth step; 0: no others."""
    ranks: bool = False
    """Of these steps, what every other rank did too, as RankTrace."""


Command = Submit | Abort | Shutdown | Ask | SetTracing


class Usage(NamedTuple):
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    forward_passes: int
    denoise_steps: int
    preemptions: int


class Timings(NamedTuple):
    """Nanoseconds; `arrival_ns` is monotonic, the rest are durations."""

    arrival_ns: int
    queue_ns: int
    prefill_ns: int
    decode_ns: int


class Mark(NamedTuple):
    """Something that happened to a traced sequence: a chunk of its prompt or a block is done."""

    at_ns: int
    is_block: bool
    num_tokens: int
    denoise_steps: int
    """Of the whole sequence until then."""


class Finish(NamedTuple):
    reason: FinishReason
    stop_token_id: int | None
    detail: str
    usage: Usage
    timings: Timings
    pauses: tuple[tuple[int, int], ...] = ()
    """Monotonic (preempted, resumed) times, the first MAX_PAUSES of them."""
    vector: bytes = b""
    """What a request to pool asked for: little-endian float32."""
    marks: tuple[Mark, ...] = ()
    """Of a traced sequence, the first MAX_MARKS of either kind, in their order."""
    remasks: int = 0
    """Of a traced sequence: tokens that were shown and gave way to others."""
    cache_refreshes: int = 0
    """Of a traced sequence: steps that computed anew what the canvas keeps of itself."""
    num_blocks: int = 0
    """From the first token behind the prompt to the last generated one."""


class ShownCanvas(NamedTuple):
    """The tentative tail of a sequence, from position `start` on."""

    start: int
    block: int
    """Of its first open position, as Blocks counts them."""
    canvas: Canvas


class Load(NamedTuple):
    """How full the engine is, and what its steps have cost the host since the start."""

    running: int
    waiting: int
    waiting_tokens: int
    pages_used: int
    pages_total: int
    steps: int = 0
    """Steps collected."""
    host_ns: int = 0
    """CPU time the core loop spent in the turns of these steps, without executor and waiting."""


class Reject(NamedTuple):
    """The sequence was never started, or failed on its own: the one terminal event it gets."""

    key: int
    error: ServiceError


class StepOutput(NamedTuple):
    """One step for all sequences, in columns: row i is keys[i] with counts[i] tokens.

    Sparse tables name rows by index. A row may have a count of 0 (finish without a token).
    """

    seq: int
    keys: list[int]
    counts: list[int]
    token_ids: bytes
    """Little-endian uint32, sum(counts) of them."""
    logprobs: list[tuple[int, list[TokenLogprobs | None]]]
    prompt_logprobs: list[tuple[int, int, list[TokenLogprobs]]]
    """(row, first prompt position, one entry per position)."""
    finished: list[tuple[int, Finish]]
    canvas: list[tuple[int, ShownCanvas]]
    load: Load
    opened: Sequence[tuple[int, int]] = ()
    """(row, tokens of its prompt that came out of the cache), with the row's first tokens."""


STEP_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768)
"""Upper bounds of the buckets in which steps are counted."""


class Tally(NamedTuple):
    """What the core has done since its start; counts stand in the buckets of STEP_BOUNDS."""

    token_counts: tuple[int, ...] = (0,) * (len(STEP_BOUNDS) + 1)
    """Steps by their query tokens, and the sum of these."""
    num_tokens: int = 0
    row_counts: tuple[int, ...] = (0,) * (len(STEP_BOUNDS) + 1)
    """Steps by their rows, and the sum of these."""
    num_rows: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    num_preemptions: int = 0
    denoise_steps: int = 0
    canvas_positions: int = 0
    committed: int = 0
    """Tokens that denoising made final."""
    memory: Memory = Memory()


class StepTrace(NamedTuple):
    """One step that somebody watches; times are monotonic."""

    seq: int
    keys: tuple[int, ...]
    """Its traced sequences, the first MAX_MEMBERS of them."""
    planned_ns: int
    launched_ns: int
    collected_ns: int
    num_rows: int
    num_new_rows: int
    num_tokens: int
    num_decided: int


class RankTrace(NamedTuple):
    """What a rank other than the first did of a step; comes behind the step's StepTrace. Times are
    monotonic."""

    seq: int
    rank: int
    launched_ns: int
    done_ns: int


class Ready(NamedTuple):
    """The core is up: what it found while loading."""

    engine: EngineFacts


class Progress(NamedTuple):
    """A stage of start-up: `done` of `total` (total 0: no number known)."""

    stage: str
    done: int
    total: int


class Fatal(NamedTuple):
    """The core is about to end. Nothing will be healed."""

    message: str
    is_refusal: bool = False
    """Nothing broke: it will not start with the flags, files or packages that it was given."""

    @property
    def words(self) -> str:
        """What everybody is told who asks for the core."""
        told = "cannot start" if self.is_refusal else "the engine core is gone"
        return f"{told}: {self.message}"


Event = (
    StepOutput
    | Reject
    | Tally
    | StepTrace
    | RankTrace
    | Ready
    | Progress
    | Fatal
    | KvEvents
    | Answer
)

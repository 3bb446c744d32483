"""What crosses the border between the frontend's rooms and its engine client.

It does not know protobuf: engine_client.py translates.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from frontend.request import Decoding, Sampling
from tidemill.runtime.errors import GenerationFailed, InvalidRequest, ServiceError
from tidemill.structured import Constraint


class FinishReason(IntEnum):
    """Numbers equal those of tidemill.v1.FinishReason, but for DEAD_END, an ERROR there."""

    STOP_TOKEN = 1
    STOP_SEQUENCE = 2
    STOP_STRING = 3
    LENGTH = 4
    ABORTED = 5
    DEADLINE = 6
    ERROR = 7
    DEAD_END = 8


class TokenLogprobs(NamedTuple):
    """One position: the token itself first, then the alternatives, best first."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    rank: int


class Usage(NamedTuple):
    """Token and step counts of one sequence, or of a request."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    forward_passes: int = 0
    denoise_steps: int = 0
    preemptions: int = 0
    reasoning_tokens: int = 0
    """Those of the output that are reasoning, its markers left out; the frontend counts them."""

    @property
    def tokens_per_forward(self) -> float:
        """Output tokens for each of the forward passes, those that only store something counted."""
        return self.output_tokens / max(1, self.forward_passes)


class Timings(NamedTuple):
    """Durations in nanoseconds, and the wall-clock start they are counted from."""

    arrival_unix_ns: int = 0
    queue_ns: int = 0
    prefill_ns: int = 0
    decode_ns: int = 0


class Finish(NamedTuple):
    """The terminal row of a sequence; `detail` is the engine's word on it."""

    reason: FinishReason
    stop_token_id: int | None
    detail: str
    usage: Usage
    timings: Timings

    @property
    def failure(self) -> ServiceError | None:
        """What an end without an answer stands for; None for answers, and where the caller gave
        up."""
        if self.reason is FinishReason.DEAD_END:
            return InvalidRequest(
                f"nothing that this request allows can follow what it has: {self.detail}",
                reason="GENERATION_DEAD_END",
            )
        if self.reason is FinishReason.ERROR:
            return GenerationFailed(f"the engine could not finish this request: {self.detail}")
        return None


class Canvas(NamedTuple):
    """Tentative tail of a diffusion row; `block` is that of its first open position."""

    block: int
    token_ids: tuple[int, ...]
    fixed: tuple[bool, ...]
    step: int
    confidence: tuple[float, ...] = ()
    """Probability of every position's token in the step that chose it."""


class Load(NamedTuple):
    """The engine's last load report: sequences, KV pages, and the tokens that wait for a row."""

    running: int = 0
    waiting: int = 0
    pages_used: int = 0
    pages_total: int = 0
    waiting_tokens: int = 0
    state: str = ""
    """Of the engine, in lower case."""
    stalled: bool = False
    """The engine's core has said nothing for too long: new work should go elsewhere."""
    paused: bool = False
    """By its operator: new work waits there."""
    memory_used: int = 0
    memory_total: int = 0
    """Bytes of the engine's device; 0: not known."""

    @classmethod
    def of_all(cls, loads: Iterable[Load]) -> Load:
        """Of several engines as of one: sums, the state that all are in, stalled or paused if all
        are."""
        given = list(loads)
        states = {one.state for one in given}
        return cls(
            running=sum(one.running for one in given),
            waiting=sum(one.waiting for one in given),
            pages_used=sum(one.pages_used for one in given),
            pages_total=sum(one.pages_total for one in given),
            waiting_tokens=sum(one.waiting_tokens for one in given),
            state=states.pop() if len(states) == 1 else "",
            stalled=bool(given) and all(one.stalled for one in given),
            paused=bool(given) and all(one.paused for one in given),
            memory_used=sum(one.memory_used for one in given),
            memory_total=sum(one.memory_total for one in given),
        )


@dataclass(slots=True, eq=False)
class Delta:
    """What happened to one sequence since its reader last looked; later steps merge into it."""

    index: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    canvas: Canvas | None = None
    finish: Finish | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequence:
    """One sequence to generate, as the engine is asked for it.

    `index` numbers it within its request, `choice` within its prompt (it keys the random
    numbers). `prompt` is little-endian uint32 token ids.
    """

    index: int
    choice: int
    prompt: bytes
    sampling: Sampling
    decoding: Decoding
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    cache_salt: str = ""
    priority: int = 0
    fairness_key: str = ""
    emit_canvas: bool = False
    pinned: tuple[tuple[int, int], ...] = ()
    """Tokens that are given behind the prompt: (absolute position, token id)."""
    constraint: Constraint | None = None
    kv_source: str = ""
    """Address of the prefill engine that its engine may fetch the prompt's KV from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What an engine says about itself when it is connected."""

    instance_id: str
    model_id: str
    max_model_len: int
    vocab_size: int
    max_logprobs: int
    tokenizer_sha256: str
    default_method: str
    methods: tuple[str, ...]
    """Empty: it is an encoder and generates nothing."""
    block_length: int
    mask_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pool_tasks: tuple[str, ...] = ()
    """Of embed, classify and score, what its hidden states serve."""
    approximate_caches: tuple[str, ...] = ()
    """Values of the decoding parameter `cache` under which answers are approximations."""
    device: str = ""
    embedding_size: int = 0
    page_size: int = 0
    """Tokens of a KV page; 0 where it does not say, as with the following two."""
    max_rows: int = 0
    max_queued_requests: int = 0
    """Sequences that may wait before others are refused."""
    role: str = "both"
    """both, prefill or decode."""
    weight_version: str = ""
    dtype: str = ""

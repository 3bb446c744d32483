"""What a client asks for, the same for HTTP and gRPC.

It does not know either of them, nor the engine's wire format.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from tidemill.runtime.errors import DeadlineExceeded
from tidemill.structured import Constraint
from tidemill.telemetry.tracer import Span


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Knobs of one sequence; None takes the engine's default for the checkpoint."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    allowed_token_ids: tuple[int, ...] = ()
    """Empty: all."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Sequences of tokens that must not appear."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoding:
    """Decoding method (None: the engine's default) and its knobs."""

    method: str | None = None
    params: dict[str, Any] = field(default_factory=dict)


class Beam(NamedTuple):
    """Beam search: `width` beams; a hypothesis' log-probability is divided by its length to the
    power of `length_penalty`; with `early_stopping` the first `width` that end are taken."""

    width: int
    length_penalty: float = 1.0
    early_stopping: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Everything about a generation that is neither the prompt nor the messages.

    `logprobs` and `prompt_logprobs` count alternatives per token; None means none at all.
    `add_special_tokens` None means: yes for text prompts, no for chats (the template adds them).
    """

    model: str = ""
    n: int = 1
    best_of: int | None = None
    """Sequences to generate, of which the `n` likeliest are returned; None: n."""
    beam: Beam | None = None
    """The `n` best of a beam search instead of samples."""
    sampling: Sampling = field(default_factory=Sampling)
    decoding: Decoding = field(default_factory=Decoding)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    add_special_tokens: bool | None = None
    constraint: Constraint | None = None
    """A grammar that every answer must follow."""
    bad_words: tuple[str, ...] = ()
    """Texts that must not appear; they become tokens of `sampling.bad_words`."""
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    echo: bool = False
    truncate_prompt_tokens: int | None = None
    truncation_side: str = "left"
    cache_salt: str = ""
    priority: int = 0
    fairness_key: str = ""
    emit_canvas: bool = False
    user: str = ""
    """Whom the client serves; for the log line, and for routing where nothing names a session."""
    session: str = ""
    """What the client calls requests that share much of their prompts; for routing only."""

    @property
    def width(self) -> int:
        """Sequences to generate for each prompt."""
        return self.n if self.best_of is None else self.best_of

    @property
    def ranks(self) -> bool:
        """More are generated than returned."""
        return self.width > self.n


class InputFormat(NamedTuple):
    """A grammar of the text that a free-form tool is given."""

    syntax: str
    """lark or regex."""
    definition: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """A conversation to be rendered with the chat template.

    Messages are dicts with `role` and `content` (a string), as templates expect them, and tools
    are OpenAI's: {"type": "function", "function": {"name", "description", "parameters"}}.
    """

    messages: list[dict[str, Any]]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    tools: tuple[dict[str, Any], ...] = ()
    """What the model may call; empty where it may call nothing."""
    input_formats: dict[str, InputFormat] = field(default_factory=dict)
    """Of the tools whose one argument, `input`, is text by a grammar: the grammar, by name."""
    must_call: bool = False
    """The answer is calls alone."""
    called: str = ""
    """The tool that must be called; empty: any of them."""
    parallel_tool_calls: bool = True
    """False: only the first call of an answer is told."""

    @property
    def continued(self) -> str:
        """The beginning of the answer, which is to be continued; empty: it is begun anew."""
        return str(self.messages[-1].get("content") or "") if self.continue_final_message else ""

    @property
    def size(self) -> int:
        """Characters of all messages and, about, of the tools."""
        described = sum(len(str(tool)) for tool in self.tools)
        return described + sum(len(message["content"]) for message in self.messages)


Prompt = str | tuple[int, ...] | Chat
"""Text, token ids, or a conversation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRequest:
    """One request of a client: several prompts make several groups of `options.width` choices."""

    prompts: tuple[Prompt, ...]
    options: Options
    suffix: str = ""
    """Text behind every prompt; `options.sampling.max_tokens` is the length of the gap between
    them, which is what is generated. Empty: the text has an open end."""
    prompt_param: str = "prompt"
    """The field that a prompt's faults are reported under."""
    logprobs_param: str = "logprobs"
    """The same of `options.logprobs`."""
    names: Mapping[str, str] = field(default_factory=dict)
    """What the client calls parameters that have another name here and at the engine."""

    def called(self, param: str) -> str:
        """The client's name of a parameter."""
        return self.names.get(param, param)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ingress:
    """How a request came in: its name, its clock and its place in a trace.

    `received` and `deadline` are seconds of the event loop's clock (CLOCK_MONOTONIC), `created`
    is in seconds since the epoch.
    """

    request_id: str
    received: float
    created: int
    span: Span
    deadline: float | None = None
    session: str = ""
    """What the client calls requests that belong together; for routing only."""
    asked: str = ""
    """The route or the method."""
    client: str = ""
    """Address of the client."""
    caller: str = ""
    """Name of the client's key."""
    use: Callable[[int], None] | None = None
    """Takes tokens from the client's allowance; None: it has no limit."""

    def too_late(self) -> DeadlineExceeded:
        """What a request ends with when its time is up."""
        allowed_s = (self.deadline or self.received) - self.received
        return DeadlineExceeded(
            f"the request did not finish within {allowed_s:.3f} s; "
            "ask for fewer tokens or allow more time"
        )


def shared_by(request: TextRequest, caller: str) -> TextRequest:
    """The request in the share of the key that it came with: a client that has one cannot take
    another's, nor have several."""
    if not caller:
        return request
    return replace(request, options=replace(request.options, fairness_key=caller))


def session_of(ingress: Ingress, options: Options) -> str:
    """The name that keeps requests together where routing does so; '' none."""
    return ingress.session or options.session or options.user


class TextPair(NamedTuple):
    """Two texts that a model is to read together."""

    left: str
    right: str


PoolInput = str | tuple[int, ...] | TextPair
"""Text, token ids, or two texts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRequest:
    """Inputs whose hidden states are wanted; nothing is generated. None takes the engine's default.

    `task` is embed, classify or score; the latter two go through the model's head, a score's of a
    single label.
    """

    inputs: tuple[PoolInput, ...]
    task: str = "embed"
    model: str = ""
    dimensions: int | None = None
    normalize: bool | None = None
    truncate_prompt_tokens: int | None = None
    """Keeps this many leading tokens of every input; -1: as many as the context holds."""
    priority: int = 0
    user: str = ""
    """Whom the client serves; for the log line only."""
    param: str = "input"
    """The field that an input's faults are reported under."""

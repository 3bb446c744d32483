"""Bookkeeping of `tidemill.LLM`: one prompt with its sequences, from submission to output.

Texts come from the frontend's Choice, so that offline and served requests read the same. It does
not know the scheduler: it makes Submit messages and reads StepOutput columns.
"""

from __future__ import annotations

import gc
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from engine_service.core.messages import Command, Event, StepOutput, Submit
from engine_service.core.messages import Finish as CoreFinish
from engine_service.core.params import ConstraintSpec, DecodingChoice
from engine_service.core.params import SamplingParams as CoreSampling
from frontend.choice import Choice, PromptView
from frontend.messages import Delta, Finish, FinishReason, Timings, TokenLogprobs, Usage
from frontend.request import Options, Sampling
from frontend.text_delta import TextDelta, TextLogprob
from frontend.tokenizer import Piece, Vocabulary
from frontend.validation import MAX_SEQUENCES, check_stop_lengths
from tidemill.outputs import CompletionOutput, Logprob, RequestOutput, RequestUsage
from tidemill.prompts import TextPrompt, packed_ids, read_bad_words
from tidemill.runtime.errors import InvalidRequest
from tidemill.sampling_params import SamplingParams
from tidemill.structured import constraint_of

_CALM = (50_000, 20, 20)


class NoText:
    """The vocabulary of an LLM without a tokenizer: every token reads as nothing."""

    def detokenizer(self, **_: Any) -> NoText:
        return self

    def piece(self, token_id: int) -> Piece:
        return Piece("", b"")

    def feed(self, token_ids: Iterable[int]) -> str:
        return ""

    def flush(self) -> str:
        return ""


@contextmanager
def calm_collector() -> Iterator[None]:
    """Keeps Python's cycle collector out of the steps, without changing the caller's settings.

    With the default thresholds it takes 0.8 of 4.4 us a token at 256 rows, for cycles that a step
    does not make.
    """
    before = gc.get_threshold()
    gc.set_threshold(*_CALM)
    try:
        yield
    finally:
        gc.set_threshold(*before)


class Mailbox:
    """The ends of a core loop that runs in its caller's thread: no commands, events kept."""

    def __init__(self) -> None:
        self._outputs: list[StepOutput] = []

    def receive(self, timeout_s: float) -> list[Command]:
        """Never anything: the caller submits to the scheduler itself, and hears its errors."""
        return []

    def send(self, batch: Sequence[Event]) -> None:
        """Keeps outputs; a Fatal is followed by the exception itself."""
        self._outputs += [event for event in batch if isinstance(event, StepOutput)]

    def take(self) -> list[StepOutput]:
        """Everything since the last call."""
        taken, self._outputs = self._outputs, []
        return taken


class Line:
    """One sequence: what it has been sent, its Choice, and everything that it has shown.

    Tokens are kept until `read`. A line with stop strings is read every step, because one of them
    may end it; the others once, at their end: nobody sees their text before, and a token then
    costs its step no more than an append (0.4 instead of 3.4 us at 256 rows).
    """

    __slots__ = ("choice", "is_watched", "request_id", "shown", "unread")

    def __init__(self, request_id: str, choice: Choice, *, is_watched: bool) -> None:
        self.request_id = request_id
        self.choice = choice
        self.is_watched = is_watched
        self.shown = TextDelta(choice.index)
        self.unread = Delta(choice.index)

    def read(self) -> bool:
        """Shows what is unread; True when a stop string became complete in it."""
        delta, self.unread = self.unread, Delta(self.choice.index)
        was_open = self.choice.matched is None
        new = self.choice.feed(delta)
        if new is not None:
            self.shown.text += new.text
            self.shown.token_ids += new.token_ids
            self.shown.logprobs += new.logprobs
            self.shown.finish_reason = new.finish_reason
            self.shown.stop_reason = new.stop_reason
        return was_open and self.choice.matched is not None


def spread(output: StepOutput, live: dict[int, Line]) -> Iterator[tuple[int, int, str]]:
    """Gives one step's tokens, scores and finishes to the lines they belong to.

    Yields (key, tokens up to the match, stop string) for texts that ended at a stop string.
    Rows of keys that nobody waits for any more are skipped.
    """
    keys, watched = output.keys, dict[int, Line]()
    token_ids = struct.unpack(f"<{len(output.token_ids) // 4}I", output.token_ids)
    start = 0
    for key, count in zip(keys, output.counts, strict=True):
        line = live.get(key)
        if line is not None:
            line.unread.token_ids += token_ids[start : start + count]
            if line.is_watched:
                watched[key] = line
        start += count
    for row, entries in output.logprobs:
        if keys[row] in live:
            known = [TokenLogprobs(*entry) for entry in entries if entry]
            live[keys[row]].unread.logprobs += known
    for row, _, scores in output.prompt_logprobs:
        if keys[row] in live:
            live[keys[row]].unread.prompt_logprobs += [TokenLogprobs(*entry) for entry in scores]
    for row, finish in output.finished:
        if keys[row] in live:
            watched[keys[row]] = live[keys[row]]
            live[keys[row]].unread.finish = _finish(finish)
    for key, line in watched.items():
        if line.read() and line.choice.finish is None:
            yield key, line.choice.num_tokens, line.choice.matched or ""


class Pending:
    """One prompt and its `n` sequences."""

    def __init__(
        self,
        request_id: str,
        prompt: TextPrompt,
        params: SamplingParams,
        vocabulary: Vocabulary,
    ) -> None:
        if not 1 <= params.n <= MAX_SEQUENCES:  # as of a service, whatever --max-n
            raise InvalidRequest(
                f"n is {params.n}; it must lie in 1..{MAX_SEQUENCES}: repeat the prompt",
                param="n",
            )
        if params.stop_strings and isinstance(vocabulary, NoText):
            raise InvalidRequest(
                "stop strings need a tokenizer: use stop_token_ids, or an LLM without "
                "skip_tokenizer_init",
                param="stop",
            )
        check_stop_lengths(params.stop_strings)
        self.request_id = request_id
        self.prompt = prompt
        self.params = params
        self.bad_words = read_bad_words(params, vocabulary)
        self.packed = packed_ids(prompt.token_ids)  # before a vocabulary reads any of them
        view = PromptView(
            prompt.token_ids, prompt.text or "", gap=prompt.gap, goes_on=prompt.goes_on
        )
        options = _options(params)
        choices = (Choice(index, view, vocabulary, options) for index in range(params.n))
        self.lines = [
            Line(request_id, choice, is_watched=bool(params.stop_strings)) for choice in choices
        ]

    @property
    def is_finished(self) -> bool:
        return all(line.choice.finish is not None for line in self.lines)

    @property
    def output(self) -> RequestOutput:
        """The finished request."""
        usages = [line.choice.usage for line in self.lines]
        prompt_logprobs = None
        if self.params.prompt_logprobs is not None:
            prompt_logprobs = [_table(entry) for entry in self.lines[0].choice.prompt_logprobs]
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt.text,
            prompt_token_ids=self.prompt.token_ids,
            prompt_logprobs=prompt_logprobs,
            outputs=[self._completion(line) for line in self.lines],
            usage=RequestUsage(
                prompt_tokens=usages[0].prompt_tokens,
                cached_tokens=sum(usage.cached_tokens for usage in usages),
                output_tokens=sum(line.choice.num_tokens for line in self.lines),
                forward_passes=sum(usage.forward_passes for usage in usages),
                denoise_steps=sum(usage.denoise_steps for usage in usages),
                preemptions=sum(usage.preemptions for usage in usages),
            ),
        )

    def _completion(self, line: Line) -> CompletionOutput:
        shown = line.shown
        wants = self.params.logprobs is not None
        return CompletionOutput(
            index=shown.index,
            text=shown.text,
            token_ids=shown.token_ids,
            finish_reason=shown.finish_reason,
            stop_reason=shown.stop_reason,
            logprobs=[_table(entry) or {} for entry in shown.logprobs] if wants else None,
            cumulative_logprob=sum(e.logprob or 0.0 for e in shown.logprobs) if wants else None,
        )


def to_submits(pending: Pending, keys: Iterator[int]) -> Iterator[Submit]:
    """One Submit per sequence; unseeded sequences of a request draw their own seeds."""
    params, prompt_len, gap = pending.params, len(pending.prompt.token_ids), pending.prompt.gap
    sampling = _core_sampling(params, pending.bad_words)
    asked = constraint_of(params.structured_outputs)
    if gap is not None:
        sampling = replace(sampling, max_tokens=gap.num_tokens + len(gap.suffix_ids))
    for choice in range(params.n):
        yield Submit(
            key=next(keys),
            request_id=f"{pending.request_id}-{choice}",
            prompt=pending.packed,
            sampling=sampling,
            decoding=DecodingChoice(method=params.method, params=params.knobs),
            choice=choice,
            pinned=gap.pinned(prompt_len) if gap else (),
            constraint=None if asked is None else ConstraintSpec(asked.kind, asked.text),
        )


def _finish(finish: CoreFinish) -> Finish:
    usage, timings = Usage(*finish.usage), Timings(*finish.timings)
    reason = FinishReason(finish.reason)
    return Finish(reason, finish.stop_token_id, finish.detail, usage, timings)


def _table(entry: TextLogprob) -> dict[int, Logprob] | None:
    """The token itself first, then the alternatives; None for a token without log-probability."""
    if entry.logprob is None:
        return None
    table = {entry.token_id: Logprob(entry.logprob, entry.rank, entry.token)}
    for other in entry.top:
        if other.logprob is not None:
            table.setdefault(other.token_id, Logprob(other.logprob, other.rank, other.token))
    return table


def _options(params: SamplingParams) -> Options:
    """What Choice needs to know: how texts end and what they show."""
    return Options(
        sampling=Sampling(max_tokens=params.max_tokens, min_tokens=params.min_tokens),
        stop=params.stop_strings,
        stop_token_ids=tuple(params.stop_token_ids),
        include_stop_str_in_output=params.include_stop_str_in_output,
        skip_special_tokens=params.skip_special_tokens,
        logprobs=params.logprobs,
        prompt_logprobs=params.prompt_logprobs,
    )


def _core_sampling(params: SamplingParams, bad_words: list[tuple[int, ...]]) -> CoreSampling:
    return CoreSampling(
        bad_words=tuple(bad_words),
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=params.logit_bias,
        seed=params.seed,
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        allowed_token_ids=tuple(params.allowed_token_ids),
        stop_token_ids=tuple(params.stop_token_ids),
        ignore_eos=params.ignore_eos,
        logprobs=params.logprobs,
        prompt_logprobs=params.prompt_logprobs,
    )

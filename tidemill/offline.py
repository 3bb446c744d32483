"""Bookkeeping of `tidemill.LLM`: one prompt with its sequences, from submission to output.

Texts come from the frontend's Choice, so that offline and served requests read the same. It does
not know the scheduler: it makes Submit messages and reads StepOutput columns.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from engine_service.core.messages import Command, Event, StepOutput, Submit
from engine_service.core.messages import Finish as CoreFinish
from engine_service.core.params import DecodingChoice
from engine_service.core.params import SamplingParams as CoreSampling
from frontend.choice import Choice, PromptView, TextDelta, TextLogprob
from frontend.messages import Delta, Finish, FinishReason, Timings, TokenLogprobs, Usage
from frontend.request import Options, Sampling
from frontend.tokenizer import Piece, Vocabulary
from tidemill.outputs import CompletionOutput, Logprob, RequestOutput, RequestUsage
from tidemill.runtime.errors import InvalidRequest
from tidemill.sampling_params import SamplingParams


class NoText:
    """The vocabulary of an LLM without a tokenizer: every token reads as nothing."""

    def detokenizer(self, *, skip_special_tokens: bool) -> NoText:
        return self

    def piece(self, token_id: int) -> Piece:
        return Piece("", b"")

    def feed(self, token_ids: Iterable[int]) -> str:
        return ""

    def flush(self) -> str:
        return ""


class TextPrompt(NamedTuple):
    text: str | None
    token_ids: list[int]


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


class _Line:
    """One sequence: its Choice, and everything that it has shown."""

    def __init__(self, choice: Choice) -> None:
        self.choice = choice
        self.shown = TextDelta(choice.index)

    def feed(self, delta: Delta) -> bool:
        """True when a stop string became complete just now."""
        was_open = self.choice.matched is None
        new = self.choice.feed(delta)
        if new is not None:
            self.shown.text += new.text
            self.shown.token_ids += new.token_ids
            self.shown.logprobs += new.logprobs
            self.shown.finish_reason = new.finish_reason
            self.shown.stop_reason = new.stop_reason
        return was_open and self.choice.matched is not None


class Pending:
    """One prompt and its `n` sequences."""

    def __init__(
        self,
        request_id: str,
        prompt: TextPrompt,
        params: SamplingParams,
        vocabulary: Vocabulary,
    ) -> None:
        if params.n < 1:
            raise InvalidRequest(f"n is {params.n}; it must be at least 1", param="n")
        if params.stop_strings and isinstance(vocabulary, NoText):
            raise InvalidRequest(
                "stop strings need a tokenizer: use stop_token_ids, or an LLM without "
                "skip_tokenizer_init",
                param="stop",
            )
        self.request_id = request_id
        self.prompt = prompt
        self.params = params
        view, options = PromptView(prompt.token_ids, prompt.text or ""), _options(params)
        choices = (Choice(index, view, vocabulary, options) for index in range(params.n))
        self._lines = [_Line(choice) for choice in choices]

    @property
    def is_finished(self) -> bool:
        return all(line.choice.finish is not None for line in self._lines)

    @staticmethod
    def take(
        output: StepOutput, live: dict[int, tuple[Pending, int]]
    ) -> Iterator[tuple[int, int, str]]:
        """Spreads one step over the live requests.

        Yields (key, tokens up to the match, stop string) for texts that ended at a stop string.
        Rows of keys that nobody waits for any more are skipped.
        """
        token_ids = struct.unpack(f"<{len(output.token_ids) // 4}I", output.token_ids)
        logprobs, finished = dict(output.logprobs), dict(output.finished)
        scores = {row: entries for row, _, entries in output.prompt_logprobs}
        start = 0
        for row, (key, count) in enumerate(zip(output.keys, output.counts, strict=True)):
            run, start = list(token_ids[start : start + count]), start + count
            if key not in live:
                continue
            pending, index = live[key]
            line = pending._lines[index]
            delta = Delta(index, token_ids=run)
            delta.logprobs += [TokenLogprobs(*entry) for entry in logprobs.get(row, []) if entry]
            delta.prompt_logprobs += [TokenLogprobs(*entry) for entry in scores.get(row, [])]
            delta.finish = _finish(finished[row]) if row in finished else None
            if line.feed(delta) and delta.finish is None:
                yield key, line.choice.num_tokens, line.choice.matched or ""

    @property
    def output(self) -> RequestOutput:
        """The finished request."""
        usages = [line.choice.usage for line in self._lines]
        prompt_logprobs = None
        if self.params.prompt_logprobs is not None:
            prompt_logprobs = [_table(entry) for entry in self._lines[0].choice.prompt_logprobs]
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt.text,
            prompt_token_ids=self.prompt.token_ids,
            prompt_logprobs=prompt_logprobs,
            outputs=[self._completion(line) for line in self._lines],
            usage=RequestUsage(
                prompt_tokens=usages[0].prompt_tokens,
                cached_tokens=sum(usage.cached_tokens for usage in usages),
                output_tokens=sum(line.choice.num_tokens for line in self._lines),
                forward_passes=sum(usage.forward_passes for usage in usages),
                denoise_steps=sum(usage.denoise_steps for usage in usages),
                preemptions=sum(usage.preemptions for usage in usages),
            ),
        )

    def _completion(self, line: _Line) -> CompletionOutput:
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
    params, prompt = pending.params, pending.prompt.token_ids
    try:
        packed = struct.pack(f"<{len(prompt)}I", *prompt)
    except (struct.error, TypeError) as failure:
        raise InvalidRequest(
            "prompt token ids must be integers from 0 to 4294967295", param="prompt_token_ids"
        ) from failure
    for choice in range(params.n):
        yield Submit(
            key=next(keys),
            request_id=f"{pending.request_id}-{choice}",
            prompt=packed,
            sampling=_core_sampling(params),
            decoding=DecodingChoice(method=params.method, params=params.method_params),
            choice=choice,
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


def _core_sampling(params: SamplingParams) -> CoreSampling:
    return CoreSampling(
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
        stop_token_ids=tuple(params.stop_token_ids),
        ignore_eos=params.ignore_eos,
        logprobs=params.logprobs,
        prompt_logprobs=params.prompt_logprobs,
    )

"""Bookkeeping of `tidemill.LLM`: one prompt with its sequences, from submission to output.

It does not know the scheduler: it makes Submit messages and reads StepOutput columns.
"""

from __future__ import annotations

import struct
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from engine_service.core.messages import Command, Event, Finish, FinishReason, StepOutput, Submit
from engine_service.core.params import DecodingChoice
from engine_service.core.params import SamplingParams as CoreSampling
from engine_service.core.step import TokenLogprobs
from frontend.detokenizer import Detokenizer
from frontend.stopping import StopChecker
from frontend.tokenizer import TextTokenizer
from tidemill.outputs import CompletionOutput, Logprob, RequestOutput, RequestUsage
from tidemill.runtime.errors import InvalidRequest
from tidemill.sampling_params import SamplingParams

_REASONS = {
    FinishReason.STOP_TOKEN: "stop",
    FinishReason.STOP_SEQUENCE: "stop",
    FinishReason.STOP_STRING: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORTED: "abort",
    FinishReason.DEADLINE: "abort",
    FinishReason.ERROR: "error",
}


class TextPrompt(NamedTuple):
    text: str | None
    token_ids: list[int]


@dataclass(slots=True, kw_only=True)
class _Sequence:
    """One choice while it runs. `matched` is the stop string that ended its text."""

    detokenizer: Detokenizer | None
    stops: StopChecker | None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    text: str = ""
    matched: str | None = None
    finish: Finish | None = None

    def feed(self, token_ids: list[int]) -> bool:
        """Takes new tokens; True when a stop string just became complete.

        Tokens behind the one that completes a stop string are dropped.
        """
        if self.stops is None or self.detokenizer is None:
            self.token_ids += token_ids
            self.text += self.detokenizer.feed(token_ids) if self.detokenizer else ""
            return False
        for token_id in token_ids:
            if self.matched is not None:
                return True
            self.token_ids.append(token_id)
            checked = self.stops.feed(self.detokenizer.feed([token_id]))
            self.text += checked.text
            self.matched = checked.matched
        return self.matched is not None

    def close(self, finish: Finish) -> None:
        self.finish = finish
        if self.detokenizer is None or self.matched is not None:
            return
        tail = self.detokenizer.flush()
        if self.stops is None:
            self.text += tail
            return
        checked = self.stops.feed(tail)
        self.matched = checked.matched
        self.text += checked.text + ("" if checked.matched else self.stops.flush())


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


class Pending:
    """One prompt and its `n` sequences."""

    def __init__(
        self,
        request_id: str,
        prompt: TextPrompt,
        params: SamplingParams,
        tokenizer: TextTokenizer | None,
    ) -> None:
        if params.n < 1:
            raise InvalidRequest(f"n is {params.n}; it must be at least 1", param="n")
        if params.stop_strings and tokenizer is None:
            raise InvalidRequest(
                "stop strings need a tokenizer: use stop_token_ids, or an LLM without "
                "skip_tokenizer_init",
                param="stop",
            )
        self.request_id = request_id
        self.prompt = prompt
        self.params = params
        self._tokenizer = tokenizer
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._sequences = [self._sequence() for _ in range(params.n)]

    @property
    def is_finished(self) -> bool:
        return all(sequence.finish is not None for sequence in self._sequences)

    @staticmethod
    def take(
        output: StepOutput, live: dict[int, tuple[Pending, int]]
    ) -> Iterator[tuple[int, int, str]]:
        """Spreads one step over the live requests.

        Yields (key, tokens up to the match, stop string) for texts that ended at a stop string.
        Rows of keys that nobody waits for any more are skipped.
        """
        token_ids = struct.unpack(f"<{len(output.token_ids) // 4}I", output.token_ids)
        owners = [live.get(key) for key in output.keys]
        for row, _, entries in output.prompt_logprobs:
            owner = owners[row]
            if owner is not None and owner[1] == 0:
                owner[0]._prompt_logprobs += entries
        logprobs, finished = dict(output.logprobs), dict(output.finished)
        start = 0
        for row, (owner, count) in enumerate(zip(owners, output.counts, strict=True)):
            run, start = list(token_ids[start : start + count]), start + count
            if owner is None:
                continue
            sequence = owner[0]._sequences[owner[1]]
            sequence.logprobs += logprobs.get(row, [])
            if sequence.matched is None and sequence.feed(run):
                yield output.keys[row], len(sequence.token_ids), sequence.matched or ""
            if row in finished:
                sequence.close(finished[row])

    @property
    def output(self) -> RequestOutput:
        """The finished request."""
        finishes = [s.finish for s in self._sequences if s.finish is not None]
        usages = [finish.usage for finish in finishes]
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt.text,
            prompt_token_ids=self.prompt.token_ids,
            prompt_logprobs=self._prompt_tables(),
            outputs=[self._completion(i, s) for i, s in enumerate(self._sequences)],
            usage=RequestUsage(
                prompt_tokens=usages[0].prompt_tokens,
                cached_tokens=sum(usage.cached_tokens for usage in usages),
                output_tokens=sum(len(s.token_ids) for s in self._sequences),
                forward_passes=sum(usage.forward_passes for usage in usages),
                denoise_steps=sum(usage.denoise_steps for usage in usages),
                preemptions=sum(usage.preemptions for usage in usages),
            ),
        )

    def _sequence(self) -> _Sequence:
        params, detokenizer = self.params, None
        if self._tokenizer is not None:
            skip = params.skip_special_tokens
            detokenizer = self._tokenizer.detokenizer(skip_special_tokens=skip)
        return _Sequence(
            detokenizer=detokenizer,
            stops=StopChecker(params.stop_strings, include=params.include_stop_str_in_output)
            if params.stop_strings
            else None,
        )

    def _completion(self, index: int, sequence: _Sequence) -> CompletionOutput:
        assert sequence.finish is not None, f"{self.request_id} has not finished"
        finish, wants = sequence.finish, self.params.logprobs is not None
        entries = [entry for entry in sequence.logprobs[: len(sequence.token_ids)] if entry]
        is_match = sequence.matched is not None
        return CompletionOutput(
            index=index,
            text=sequence.text,
            token_ids=sequence.token_ids,
            finish_reason="stop" if is_match else _REASONS[finish.reason],
            stop_reason=sequence.matched or self._stop_reason(finish),
            logprobs=[self._table(entry) for entry in entries] if wants else None,
            cumulative_logprob=sum(e.logprobs[0] for e in entries) if wants else None,
        )

    def _stop_reason(self, finish: Finish) -> int | None:
        """The token that stopped the text, if the request itself had named it."""
        named = finish.stop_token_id in self.params.stop_token_ids
        return finish.stop_token_id if named else None

    def _prompt_tables(self) -> list[dict[int, Logprob] | None] | None:
        if self.params.prompt_logprobs is None:
            return None
        return [None, *(self._table(entry) for entry in self._prompt_logprobs)]

    def _table(self, entry: TokenLogprobs) -> dict[int, Logprob]:
        """The chosen token first; alternatives carry their place in the ranking."""
        ranks = [entry.rank, *range(1, len(entry.token_ids))]
        table: dict[int, Logprob] = {}
        for token_id, logprob, rank in zip(entry.token_ids, entry.logprobs, ranks, strict=True):
            piece = self._tokenizer.piece(token_id).text if self._tokenizer else ""
            table.setdefault(token_id, Logprob(logprob, rank, piece))
        return table


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
            request_id=f"{pending.request_id}-{choice}-{uuid.uuid4().hex[:8]}",
            prompt=packed,
            sampling=_core_sampling(params),
            decoding=DecodingChoice(method=params.method, params=params.method_params),
            choice=choice,
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

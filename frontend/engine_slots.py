"""The requests of one session with an engine: their handles, and whose rows come back.

It does not know connections; messages are translated by engine_convert.py.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

from frontend import engine_convert as convert
from frontend.call import Call
from frontend.liveness import SIGN_S
from frontend.message_limit import MessageLimit
from frontend.messages import Sequence as EngineSequence
from frontend.outbox import MAX_UNSENT_BYTES, Outbox
from frontend.rounds import Rounds
from tidemill.runtime.errors import InvalidRequest, ServiceError
from tidemill.telemetry.context import TraceContext
from tidemill.v1 import engine_pb2 as pb

_TOKEN_BYTES = 4


class Slots:
    """Handles from their Submit to their end. What is to be sent waits in `outbox`."""

    def __init__(self, rounds: Rounds, limit: MessageLimit) -> None:
        self.outbox: Outbox[pb.SessionRequest] = Outbox()
        self._owners: dict[int, tuple[Call, int, int]] = {}
        """By handle, ascending: whose it is, which of its sequences, and how long its prompt."""
        self._handles = itertools.count(1)
        self._rounds = rounds
        self._limit = limit
        self._is_closed = False
        self._at_report = 0
        self.sent_tokens = 0
        """Of the prompts sent that the last load report did not know."""

    def __len__(self) -> int:
        """Sequences that the engine still owes something."""
        return len(self._owners)

    @property
    def sent(self) -> int:
        """Sequences sent that the last load report did not know, less those ended since."""
        return len(self._owners) - self._at_report

    def reported(self, known: int) -> None:
        """The engine has said how it is loaded, with the first `known` sequences of the session
        (handles count them). Others may have crossed the report on their way."""
        unknown: list[int] = []
        for handle in reversed(self._owners):
            if handle <= known:
                break
            unknown.append(self._owners[handle][2])
        self._at_report, self.sent_tokens = len(self._owners) - len(unknown), sum(unknown)

    def open(
        self,
        request_id: str,
        sequences: Sequence[EngineSequence],
        *,
        timeout_ms: int | None,
        trace: TraceContext | None,
    ) -> Call:
        """Submits one request; its sequences form one group. Raises Overloaded when the engine
        does not read, and InvalidRequest for a sequence that is too large for a message, or for
        more of them than may wait."""
        self.outbox.check_room()
        specs = list[pb.GenerateSpec]()
        num_bytes = 0
        for sequence, sampling in zip(sequences, _samplings(sequences), strict=True):
            spec = convert.to_spec(sequence, sampling)
            spec.request_id = spec.group = request_id
            if timeout_ms is not None:
                spec.timeout_ms = timeout_ms
            if trace is not None:
                spec.traceparent, spec.tracestate = trace.traceparent, trace.state
            num_bytes += self._limit.check(spec)
            _check_sum(num_bytes, len(sequences))
            specs.append(spec)
        handles = [next(self._handles) for _ in sequences]
        call = Call(handles, release=self._release, stop=self._stop_matched, rounds=self._rounds)
        for handle, sequence, spec in zip(handles, sequences, specs, strict=True):
            num_tokens = len(sequence.prompt) // _TOKEN_BYTES
            self._owners[handle] = (call, sequence.index, num_tokens)
            self.sent_tokens += num_tokens
            submit = pb.Submit(handle=handle, spec=spec)
            self.outbox.put(pb.SessionRequest(submit=submit))
        return call

    async def outgoing(self) -> pb.SessionRequest:
        """What is to be written next: the oldest of the outbox, or a ping when nothing comes up."""
        try:
            async with asyncio.timeout(SIGN_S):
                return await self.outbox.get()
        except TimeoutError:
            return pb.SessionRequest(ping=pb.Ping())

    def on_step(self, step: pb.Step) -> None:
        """Hands the rows of one engine step to their calls. Unknown handles were aborted."""
        token_ids = convert.unpack_ids(step.token_ids)
        owners = [self._owners.get(handle) for handle in step.handles]
        at = 0
        for owner, count in zip(owners, step.counts, strict=True):
            if owner is not None and count:
                owner[0].add_tokens(owner[1], token_ids[at : at + count])
            at += count
        for given in step.prompt_logprobs:
            if (owner := owners[given.row]) is not None:
                owner[0].add_prompt_logprobs(owner[1], convert.to_logprobs(given.positions))
        for scored in step.logprobs:
            if (owner := owners[scored.row]) is not None:
                owner[0].add_logprobs(owner[1], convert.to_logprobs(scored.positions))
        for shown in step.canvas:
            if (owner := owners[shown.row]) is not None:
                owner[0].show_canvas(owner[1], convert.to_canvas(shown))
        for ended in step.finished:
            if (owner := owners[ended.row]) is not None:
                self._owners.pop(step.handles[ended.row], None)
                owner[0].finish(owner[1], convert.to_finish(ended.finish))

    def on_failed(self, failed: pb.Failed) -> None:
        """The request ends, with the other sequences of it."""
        owner = self._owners.pop(failed.handle, None)
        if owner is None:
            return
        owner[0].close()
        owner[0].fail(convert.to_error(failed))

    def close(self, error: ServiceError) -> None:
        """The session is lost: every live request ends with `error`; nothing is resubmitted."""
        self._is_closed = True
        owners, self._owners = self._owners, {}
        for call, *_ in owners.values():
            call.fail(error)

    def cut_short(self, error: ServiceError) -> None:
        """Every live request is aborted, and ends with `error` behind what has arrived."""
        for call in dict.fromkeys(call for call, *_ in self._owners.values()):
            call.close()
            call.fail(error)

    def _release(self, handles: list[int], abort: bool) -> None:
        for handle in handles:
            self._owners.pop(handle, None)
        if abort and not self._is_closed:
            gone = pb.AbortHandles(handles=handles)
            self.outbox.put(pb.SessionRequest(abort=gone))

    def _stop_matched(self, handle: int, num_tokens: int, stop: str) -> None:
        matched = pb.StopMatched(handle=handle, completion_tokens=num_tokens, stop_string=stop)
        self.outbox.put(pb.SessionRequest(stop_matched=matched))


def _samplings(sequences: Sequence[EngineSequence]) -> list[pb.SamplingParams]:
    """What each asks of sampling. What they have in common is converted once, a hundred thousand
    allowed tokens for each of a thousand prompts were minutes; and too much of it is refused before
    anything is copied."""
    before, sampling, size = None, pb.SamplingParams(), 0
    made, num_bytes = list[pb.SamplingParams](), 0
    for sequence in sequences:
        if sequence.sampling != before:
            before, sampling = sequence.sampling, convert.to_sampling(sequence.sampling)
            size = sampling.ByteSize()
        num_bytes += size
        if made:  # of a single one that is too large its message's limit says more
            _check_sum(num_bytes, len(sequences))
        made.append(sampling)
    return made


def _check_sum(num_bytes: int, count: int) -> None:
    if num_bytes > MAX_UNSENT_BYTES:
        raise InvalidRequest(
            f"the {count} sequences of this request are more than {MAX_UNSENT_BYTES} bytes on "
            "their way to the engine; send several requests, or fewer listed tokens"
        )

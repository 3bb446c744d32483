"""What one Generate call of a gateway has to tell: pieces of every output, or each as a whole.

It does not know streams.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Any

from engine_service.core.messages import Finish, Submit
from engine_service.core.step import TokenLogprobs
from engine_service.server.outlet import TOKEN_BYTES, StepRows
from engine_service.server.vllm_engine.convert_out import Wire
from engine_service.server.vllm_engine.text import StopWatch


class _Output:
    """One of the n outputs: what is not told yet, and how long it is."""

    def __init__(self, watch: StopWatch | None) -> None:
        self.watch = watch
        self.matched = ""
        self.num_tokens = 0
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs | None] = []
        self.scores: list[TokenLogprobs] = []
        self.cached_tokens = 0

    def take(self, token_ids: list[int], logprobs: list[TokenLogprobs | None]) -> bool:
        """Adds what a step brought, up to a stop string; True when that was found just now."""
        if self.matched:
            return False
        found = self.watch.feed(token_ids) if self.watch is not None else None
        if found is not None:
            length, self.matched = found
            token_ids, logprobs = token_ids[:length], logprobs[:length]
        self.num_tokens += len(token_ids)
        self.token_ids += token_ids
        self.logprobs += logprobs
        return found is not None


class Outputs:
    """Turns rows, whose handles are indexes of outputs, into responses."""

    def __init__(
        self,
        wire: Wire,
        submits: list[Submit],
        *,
        streamed: bool,
        watches: list[StopWatch | None],
        stop: Callable[[int, int, str], None],
    ) -> None:
        """`stop` ends an output of the engine: (index, tokens that count, stop string)."""
        self._wire = wire
        self._streamed = streamed
        self._stop = stop
        self._prompt = submits[0].prompt
        self._stop_token_ids = submits[0].sampling.stop_token_ids
        self._outputs = [_Output(watch) for watch in watches]

    def answers(self, rows: StepRows) -> Iterator[Any]:
        """Raises the ServiceError of an output that has none."""
        for row, _, entries in rows.prompt_logprobs:
            self._outputs[rows.handles[row]].scores += entries
        for row, cached in rows.opened:
            self._outputs[rows.handles[row]].cached_tokens = cached
        logprobs, finished = dict(rows.logprobs), dict(rows.finished)
        offset = 0
        for row, (index, count) in enumerate(zip(rows.handles, rows.counts, strict=True)):
            packed = rows.token_ids[offset : offset + count * TOKEN_BYTES]
            offset += count * TOKEN_BYTES
            output = self._outputs[index]
            if output.take(list(struct.unpack(f"<{count}I", packed)), logprobs.get(row, [])):
                self._stop(index, output.num_tokens, output.matched)
            if self._streamed and output.token_ids:
                yield self._chunk(index, output)
            if row in finished:
                yield self._complete(index, output, finished[row])

    def _chunk(self, index: int, output: _Output) -> Any:
        chunk = self._wire.chunk(
            index,
            output.token_ids,
            prompt_tokens=len(self._prompt) // TOKEN_BYTES,
            cached_tokens=output.cached_tokens,
            logprobs=output.logprobs,
            scores=self._scores(output),
        )
        output.token_ids, output.logprobs = [], []
        return chunk

    def _complete(self, index: int, output: _Output, finish: Finish) -> Any:
        return self._wire.complete(
            index,
            finish,
            output_ids=output.token_ids,
            num_output=output.num_tokens,
            matched=output.matched,
            stop_token_ids=self._stop_token_ids,
            logprobs=output.logprobs,
            scores=self._scores(output),
        )

    def _scores(self, output: _Output) -> Any:
        """Those of the prompt, told once."""
        entries, output.scores = output.scores, []
        return self._wire.input_logprobs(self._prompt, entries) if entries else None

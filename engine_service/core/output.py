"""Collects what one turn of the loop has to tell, in the columns of StepOutput.

It does not know requests: keys, tokens and finishes are written into it row by row.
"""

from __future__ import annotations

import struct

from engine_service.core.messages import Finish, Load, ShownCanvas, StepOutput
from engine_service.core.step import TokenLogprobs


class OutputWriter:
    """One writer for the life of a scheduler; `take` empties it."""

    def __init__(self) -> None:
        self._seq = 0
        self._reset()

    def __bool__(self) -> bool:
        return bool(self._rows)

    def row(self, key: int, tokens: list[int]) -> int:
        """Opens the row of `key` with its newly committed tokens; returns its index."""
        row = self._rows[key] = len(self._counts)
        self._counts.append(len(tokens))
        self._tokens += tokens
        return row

    def rows(self, keys: list[int], tokens: list[int]) -> None:
        """Opens a row for every one of `keys`, with one token each."""
        first = len(self._counts)
        self._rows.update(zip(keys, range(first, first + len(keys)), strict=True))
        self._counts += [1] * len(keys)
        self._tokens += tokens

    def row_of(self, key: int) -> int:
        """The row of `key`, opened without tokens if it has none yet."""
        row = self._rows.get(key)
        return self.row(key, []) if row is None else row

    def tell(
        self, key: int, tokens: list[int], logprobs: list[TokenLogprobs | None] | None, cached: int
    ) -> None:
        """The row of `key` with an entry per token, if there are any; `cached` tokens of its prompt
        were found in the cache, told with its first ones (negative: these are not)."""
        row = self.row(key, tokens)
        if cached >= 0:
            self._opened.append((row, cached))
        if logprobs is not None:
            self._logprobs.append((row, logprobs))

    def prompt_logprobs(self, row: int, start: int, entries: list[TokenLogprobs]) -> None:
        """Scores of the prompt tokens from position `start` on."""
        self._prompt_logprobs.append((row, start, entries))

    def finish(self, key: int, finish: Finish) -> None:
        """The terminal event of `key`."""
        self._finished.append((self.row_of(key), finish))

    def canvas(self, key: int, shown: ShownCanvas) -> None:
        """The tentative tail of `key`."""
        self._canvas.append((self.row_of(key), shown))

    def take(self, load: Load) -> StepOutput:
        """Everything written since the last call. Sequence numbers count from 1."""
        assert len(self._rows) == len(self._counts), "a key has two rows in one output"
        self._seq += 1
        output = StepOutput(
            seq=self._seq,
            keys=list(self._rows),
            counts=self._counts,
            token_ids=struct.pack(f"<{len(self._tokens)}I", *self._tokens),
            logprobs=self._logprobs,
            prompt_logprobs=self._prompt_logprobs,
            finished=self._finished,
            canvas=self._canvas,
            load=load,
            opened=self._opened,
        )
        self._reset()
        return output

    def _reset(self) -> None:
        self._rows: dict[int, int] = {}
        self._counts: list[int] = []
        self._tokens: list[int] = []
        self._logprobs: list[tuple[int, list[TokenLogprobs | None]]] = []
        self._prompt_logprobs: list[tuple[int, int, list[TokenLogprobs]]] = []
        self._finished: list[tuple[int, Finish]] = []
        self._canvas: list[tuple[int, ShownCanvas]] = []
        self._opened: list[tuple[int, int]] = []

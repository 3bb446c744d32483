"""Text at the edge of an engine that knows tokens: prompts as text, and stop strings.

Gateways tokenize themselves, but their contract also lets them send text and leave stop strings to
the engine. It does not know messages or streams.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from engine_service.server.tokenizer_files import TokenizerFiles
from engine_service.server.vllm_engine.convert_in import Stops
from tidemill.runtime.errors import InvalidRequest, ServiceError, Unsupported

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.decoders import DecodeStream

_FILE = "tokenizer.json"


class TextEdge:
    """The checkpoint's tokenizer, read when a request first needs it."""

    def __init__(self) -> None:
        self._tokenizer: Tokenizer | None = None

    async def tokenizer(
        self, files: TokenizerFiles | ServiceError | None, *, param: str
    ) -> Tokenizer:
        """Raises Unsupported, naming `param`, where there is no tokenizer.json."""
        if self._tokenizer is None:
            path = files.folder / _FILE if isinstance(files, TokenizerFiles) else Path(_FILE)
            if not isinstance(files, TokenizerFiles) or not path.is_file():
                raise Unsupported(
                    f"{param}: the engine needs a {_FILE} for it; send token ids (tokenized, "
                    "stop_token_ids), or start the engine with --tokenizer FOLDER",
                    param=param,
                )
            from tokenizers import Tokenizer

            self._tokenizer = await asyncio.to_thread(Tokenizer.from_file, str(path))
        return self._tokenizer


async def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of a prompt, with what the tokenizer puts around every text."""
    if not text:
        raise InvalidRequest("text is empty; send a prompt", param="text")
    return list((await asyncio.to_thread(tokenizer.encode, text)).ids)


class StopWatch:
    """Finds the first stop string in one output while that grows."""

    def __init__(self, tokenizer: Tokenizer, stops: Stops) -> None:
        self._tokenizer = tokenizer
        self._stops = stops
        self._stream = self._open()
        self._kept = max(map(len, stops.texts)) - 1
        self._tail = ""
        self._num_tokens = 0

    def feed(self, token_ids: list[int]) -> tuple[int, str] | None:
        """(how many of these tokens there are up to the stop string's end, the string)."""
        for index, token in enumerate(token_ids):
            self._num_tokens += 1
            piece = self._read(token)
            text, old = self._tail + piece, len(self._tail)
            starts = [
                (text.find(one, max(0, old - len(one) + 1)), one) for one in self._stops.texts
            ]
            found = [start for start in starts if start[0] >= 0]
            if found and self._num_tokens > self._stops.min_tokens:
                return index + 1, min(found)[1]
            self._tail = text[-self._kept :] if self._kept else ""
        return None

    def _open(self) -> DecodeStream:
        from tokenizers.decoders import DecodeStream

        return DecodeStream(skip_special_tokens=self._stops.skip_special_tokens)

    def _read(self, token: int) -> str:
        """The text that came with it. Bytes that turn out to be no character change text that the
        library has told already, which it refuses: it begins anew then."""
        try:
            return self._stream.step(self._tokenizer, token) or ""
        except Exception as failure:  # the library has no type for it
            if "Invalid prefix" not in str(failure):
                raise
            self._stream = self._open()
            self._tail = ""  # between it and this stand bytes that are none of a stop string's
            return self._stream.step(self._tokenizer, token) or ""

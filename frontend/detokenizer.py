"""Incremental decoding: token ids in, text that can no longer change out.

It does not know stop strings or choices; there is one object per choice.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

_MAX_HELD = 16
"""Tokens a tail that ends in U+FFFD may hold: a character has at most 4 bytes, so at most 4
tokens are waiting for a rest that can still come; more only means invalid bytes."""


class Detokenizer(Protocol):
    """Deltas of `feed` and the last `flush` add up to the decoding of the whole sequence."""

    def feed(self, token_ids: Iterable[int]) -> str:
        """The text that became certain with these tokens; half characters are held back."""
        ...

    def flush(self) -> str:
        """What is still held back: an incomplete character becomes U+FFFD. Call once."""
        ...


class ByteDetokenizer:
    """Exact for byte-level vocabularies: tokens are bytes, text is their UTF-8 decoding.

    `pieces[i]` are the bytes of token i, empty where a token shows no text.
    """

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_ids: Iterable[int]) -> str:
        pieces = self._pieces
        known = len(pieces)
        return self._decoder.decode(b"".join([pieces[i] for i in token_ids if i < known]))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """For any other vocabulary: decodes a sliding window twice and emits the difference.

    The window starts one emission back, because decoders strip or add spaces at the beginning of
    what they see. `decode` maps ids to text. A run of byte-fallback tokens that turns invalid
    after a complete character keeps that character (the whole-sequence decoding would not).
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], before: Sequence[int] = ()) -> None:
        """`before` are tokens in front of the first one, of a text that goes on with it: without
        them a space at its beginning would be lost. They are not read before there is one, as
        nobody has checked them yet; half a character at their end is left alone."""
        self._decode = decode
        self._ids = list(before)
        self._num_emitted = len(self._ids)
        self._is_fresh = bool(before)

    def feed(self, token_ids: Iterable[int]) -> str:
        if self._is_fresh:
            self._is_fresh = False
            if self._decode(self._ids).endswith("\ufffd"):
                self._ids, self._num_emitted = [], 0
        return "".join([self._feed_one(i) for i in token_ids])

    def flush(self) -> str:
        before, now = self._decode(self._ids[: self._num_emitted]), self._decode(self._ids)
        self._ids, self._num_emitted = [], 0
        return now[len(before) :]

    def _feed_one(self, token_id: int) -> str:
        self._ids.append(token_id)
        before, now = self._decode(self._ids[: self._num_emitted]), self._decode(self._ids)
        is_new = len(now) > len(before)
        if len(self._ids) - self._num_emitted < _MAX_HELD:
            if not is_new or now.endswith("\ufffd"):
                return ""
        elif not is_new:  # a long run of tokens without text: they need not be decoded again
            del self._ids[self._num_emitted :]
            return ""
        del self._ids[: self._num_emitted]
        self._num_emitted = len(self._ids)
        return now[len(before) :]


class UnspacedDetokenizer:
    """Shows a special token that follows another one as it is written, without the space that
    decoders put in front of it.

    `special` are the special tokens by id; a special token is text, so none is ever held back.
    """

    def __init__(
        self, decoding: Detokenizer, special: Mapping[int, str], before: Sequence[int] = ()
    ) -> None:
        self._decoding = decoding
        self._special = special
        self._was_special = bool(before) and before[-1] in special

    def feed(self, token_ids: Iterable[int]) -> str:
        return "".join([self._feed_one(i) for i in token_ids])

    def flush(self) -> str:
        return self._decoding.flush()

    def _feed_one(self, token_id: int) -> str:
        text, written = self._decoding.feed((token_id,)), self._special.get(token_id)
        follows, self._was_special = self._was_special, written is not None
        return written if written is not None and follows else text

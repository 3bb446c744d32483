"""Text to token ids and back, for one model.

It does not know requests; encoding blocks and belongs on a thread (see encode_pool).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from tokenizers import Encoding, Tokenizer

from frontend.detokenizer import (
    ByteDetokenizer,
    Detokenizer,
    UnspacedDetokenizer,
    WindowDetokenizer,
)
from frontend.encode_pool import SHORT_CHARS
from tidemill.runtime.errors import FailedPrecondition, InvalidRequest
from tidemill.sentencepiece import MODEL_FILE, tokenizer_json
from tidemill.written import read_written


class Piece(NamedTuple):
    """One token on its own: what it reads as, and its bytes (half characters stay bytes)."""

    text: str
    content: bytes


class Vocabulary(Protocol):
    """What reading tokens takes: as a running text, and one by one."""

    def detokenizer(
        self,
        *,
        skip_special_tokens: bool,
        spaces_between_special_tokens: bool = True,
        before: Sequence[int] = (),
    ) -> Detokenizer: ...

    def piece(self, token_id: int) -> Piece: ...


class TextTokenizer:
    """A tokenizer folder: tokenizer.json, or a SentencePiece model in its place, and what
    tokenizer_config.json says about templates.

    `template_variables` are the special tokens by name, `chat_template` the template's text or
    None. Raises FailedPrecondition, saying what to do, when the folder cannot be used.
    """

    def __init__(self, folder: Path) -> None:
        self._tokenizer = _load(folder)
        settings = _read_json(folder / "tokenizer_config.json")
        self.template_variables = _special_tokens(
            {**_read_json(folder / "special_tokens_map.json"), **settings}
        )
        self.chat_template = _chat_template(folder, settings)
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = {i: token.content for i, token in added.items() if token.special}
        layout = json.loads(self._tokenizer.to_str())
        self._pieces = self._byte_pieces(layout["decoder"])
        swallow_spaces = any(token.lstrip or token.rstrip for token in added.values())
        pieces = None if swallow_spaces else self._pieces
        self._most_chars = _most_chars_per_token(pieces, layout["normalizer"])
        self._visible = self._pieces and [
            b"" if i in self._special else piece for i, piece in enumerate(self._pieces)
        ]
        self._single: dict[int, Piece] = {}

    @property
    def special_ids(self) -> Collection[int]:
        """Tokens that are no text."""
        return self._special

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids. Raises InvalidRequest for text that is not Unicode (lone surrogates)."""
        return self._encoding(text, add_special_tokens=add_special_tokens).ids

    def _encoding(self, text: str, *, add_special_tokens: bool = False) -> Encoding:
        """Without offsets where the text is long: there the library's way for batches lets other
        threads run, which that for one text does not, and takes a fifth of its time."""
        named = {"add_special_tokens": add_special_tokens}
        try:
            if len(text) <= SHORT_CHARS:
                return self._tokenizer.encode(text, **named)
            (encoding,) = self._tokenizer.encode_batch_fast([text], **named)
        except (UnicodeEncodeError, TypeError) as failure:
            raise InvalidRequest(f"the text is not valid Unicode: {failure}") from failure
        return encoding

    def as_transformers(self, max_tokens: int) -> Any:
        """The same tokenizer, with its template, behind the interface of transformers' own. It
        warns of texts longer than `max_tokens`."""
        from transformers import PreTrainedTokenizerFast

        kind: Any = PreTrainedTokenizerFast
        added = {token.content for token in self._tokenizer.get_added_tokens_decoder().values()}
        names = self.template_variables.items()
        made = kind(
            tokenizer_object=self._tokenizer,
            chat_template=self.chat_template,
            model_max_length=max_tokens,
            **{name: text for name, text in names if text in added},
        )
        for name, text in names:
            if text not in added:  # what it is made with is added, and texts would be split at it
                setattr(made, name, text)
        return made

    def encode_input(
        self, text: str, second: str | None = None, *, keep: int | None = None, param: str = "input"
    ) -> tuple[list[int], int | None]:
        """Token ids of a text, or of two, with the model's special tokens, and where the second
        one starts (None without one).

        At most `keep` tokens, special ones included: the end is cut, of a pair that of the second
        text. Raises InvalidRequest where `keep` leaves no room, or the second text, which `param`
        brought, has no tokens: it would start nowhere.
        """
        own = self._encoding(text)
        other = None if second is None else self._encoding(second)
        if other is not None and not other.ids:
            why = f"{param} has a text without tokens in this vocabulary: leave it out"
            raise InvalidRequest(why, param=param)
        if keep is not None:
            room = keep - self._tokenizer.num_special_tokens_to_add(other is not None)
            room -= 0 if other is None else len(own.ids)
            if room < 1:
                raise InvalidRequest(
                    f"truncate_prompt_tokens is {keep}, which leaves no room beside special tokens"
                    f"{'' if other is None else ' and the first text'}; raise it by {1 - room} at "
                    "least",
                    param="truncate_prompt_tokens",
                )
            last = own if other is None else other
            if room < len(last.ids):  # the library takes no number beyond 64 bits
                last.truncate(room)
        merged = self._tokenizer.post_process(own, other, True)
        return merged.ids, None if other is None else merged.sequence_ids.index(1)

    def least_tokens(self, text: str) -> int:
        """A lower bound of the tokens of `text` without encoding it, which takes 1 s per MB."""
        return len(text) // self._most_chars if self._most_chars else 0

    def decode(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        """The whole sequence's text; ids without a token decode to nothing."""
        if spaces_between_special_tokens:
            return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        unspaced = self.detokenizer(
            skip_special_tokens=skip_special_tokens, spaces_between_special_tokens=False
        )
        return unspaced.feed(token_ids) + unspaced.flush()

    def detokenizer(
        self,
        *,
        skip_special_tokens: bool,
        spaces_between_special_tokens: bool = True,
        before: Sequence[int] = (),
    ) -> Detokenizer:
        """A fresh incremental decoder for one choice. Its text goes on behind that of `before`,
        so that a space in front of it is kept.

        Byte-level vocabularies never put spaces between tokens, nor take any away.
        """
        if self._pieces is not None and self._visible is not None:
            return ByteDetokenizer(self._visible if skip_special_tokens else self._pieces)
        decode = partial(self.decode, skip_special_tokens=skip_special_tokens)
        if skip_special_tokens or spaces_between_special_tokens:
            return WindowDetokenizer(decode, before)
        return UnspacedDetokenizer(WindowDetokenizer(decode, before), self._special, before)

    def piece(self, token_id: int) -> Piece:
        """One token on its own, for logprobs."""
        known = self._single.get(token_id)
        if known is None:
            known = self._single[token_id] = self._make_piece(token_id)
        return known

    def _make_piece(self, token_id: int) -> Piece:
        if self._pieces is not None:
            content = self._pieces[token_id] if token_id < len(self._pieces) else b""
            return Piece(content.decode("utf-8", "replace"), content)
        name = self._tokenizer.id_to_token(token_id) or ""
        if name.startswith("<0x") and name.endswith(">") and len(name) == 6:
            content = bytes([int(name[3:5], 16)])
            return Piece(content.decode("utf-8", "replace"), content)
        # Decoders strip the space in front of a sequence: decode behind another token.
        around = self.decode([token_id, token_id], skip_special_tokens=False)
        alone = self.decode([token_id], skip_special_tokens=False)
        text = around[len(alone) :]
        return Piece(text, text.encode())

    def _byte_pieces(self, decoder: dict[str, Any] | None) -> list[bytes] | None:
        """Bytes of each token of a byte-level vocabulary; None for other vocabularies."""
        if decoder is None or decoder.get("type") != "ByteLevel":
            return None
        byte_of = _byte_alphabet()
        size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        pieces = [b""] * max(size, max(ids.values(), default=-1) + 1)
        for name, token_id in ids.items():
            try:
                pieces[token_id] = bytes([byte_of[c] for c in name])
            except KeyError:  # an added token with characters outside the alphabet stands as it is
                pieces[token_id] = name.encode()
        return pieces


def _most_chars_per_token(
    pieces: list[bytes] | None, normalizer: dict[str, Any] | None
) -> int | None:
    """Most characters of a text that one token can stand for; None where nobody knows.

    A byte-level token has at least one byte per character; NFC makes at most 4 characters one.
    """
    kind = None if normalizer is None else normalizer.get("type")
    shrinks = {None: 1, "NFC": 4}.get(kind)
    if not pieces or shrinks is None:
        return None
    return shrinks * max(1, *map(len, pieces))


def _byte_alphabet() -> dict[str, int]:
    """Inverse of GPT-2's printable names for the 256 bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in set(printable)]
    names = {chr(b): b for b in printable}
    return names | {chr(256 + i): b for i, b in enumerate(rest)}


def _load(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    converted = None
    if not path.is_file():
        if not (folder / MODEL_FILE).is_file():
            raise FailedPrecondition(
                f"no tokenizer.json in {folder}: put one there (transformers: "
                "AutoTokenizer.from_pretrained(...).save_pretrained(folder)) or name another "
                "folder with --tokenizer",
                reason="TOKENIZER_MISSING",
            )
        converted = tokenizer_json(folder)
    try:
        tokenizer = Tokenizer.from_str(converted or read_written(path))
    except Exception as failure:  # the library raises bare Exception for a broken file
        raise FailedPrecondition(
            f"{path} is not a tokenizer: {failure}", reason="TOKENIZER_BROKEN"
        ) from failure
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(read_written(path))
    except ValueError as failure:
        raise FailedPrecondition(
            f"{path} is not JSON: {failure}; fetch the file again", reason="TOKENIZER_BROKEN"
        ) from failure
    return content if isinstance(content, dict) else {}


def _special_tokens(settings: dict[str, Any]) -> dict[str, str]:
    """bos_token, eos_token and so on, which chat templates may refer to."""
    found = {}
    for name, value in settings.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found


def _chat_template(folder: Path, settings: dict[str, Any]) -> str | None:
    """chat_template.jinja goes before the setting; of several named ones, `default` counts."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return read_written(file)
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    return template if isinstance(template, str) else None

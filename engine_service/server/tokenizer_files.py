"""The tokenizer's files that GetTokenizer serves, so that a frontend needs no model folder.

It does not know what is in them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tidemill.runtime.errors import FailedPrecondition, NotFound

CHUNK_BYTES = 256 << 10
MAX_FILE_BYTES = 128 << 20
MAX_BYTES = 256 << 20
_ADVICE = "start the engine with --tokenizer FOLDER, or the frontend with its own --tokenizer"
_REQUIRED = ("tokenizer.json", "tokenizer.model", "vocab.json")
_NAMES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "config.json",
    "generation_config.json",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFiles:
    """`files` are (name, size); `sha256` is over their contents, one after the other."""

    folder: Path
    files: tuple[tuple[str, int], ...]
    sha256: str

    def chunks(self, max_message_bytes: int) -> Iterator[tuple[int, bytes]]:
        """(index of the file, at most 256 KiB and half a message) in order. Blocking: it reads the
        disk."""
        size = max(1, min(CHUNK_BYTES, max_message_bytes // 2))
        for index, (name, _) in enumerate(self.files):
            with (self.folder / name).open("rb") as file:
                while content := file.read(size):
                    yield index, content


def read_tokenizer(folder: str) -> TokenizerFiles:
    """Hashes the files of `folder`. Blocking; raises NotFound or FailedPrecondition."""
    try:
        return _read(folder)
    except OSError as failure:
        raise FailedPrecondition(
            f"the tokenizer cannot be read: {failure.filename}: {failure.strerror}; {_ADVICE}",
            reason="TOKENIZER_UNREADABLE",
        ) from failure


def _read(folder: str) -> TokenizerFiles:
    root = Path(folder)
    if not folder or not any((root / name).is_file() for name in _REQUIRED):
        where = f"{root.name!r} has none of {', '.join(_REQUIRED)}" if folder else "there is none"
        raise NotFound(f"no tokenizer to serve: {where}; {_ADVICE}", reason="NO_TOKENIZER")
    sizes = {name: (root / name).stat().st_size for name in _NAMES if (root / name).is_file()}
    largest = max(sizes, key=lambda name: sizes[name])
    if sizes[largest] > MAX_FILE_BYTES or sum(sizes.values()) > MAX_BYTES:
        raise FailedPrecondition(
            f"the tokenizer is too large to serve: {largest} has {sizes[largest]} bytes (limit "
            f"{MAX_FILE_BYTES} a file, {MAX_BYTES} in all); {_ADVICE}",
            reason="TOKENIZER_TOO_LARGE",
        )
    digest = hashlib.sha256()
    for name in sizes:
        digest.update((root / name).read_bytes())
    return TokenizerFiles(folder=root, files=tuple(sizes.items()), sha256=digest.hexdigest())

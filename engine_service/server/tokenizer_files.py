"""The tokenizer's files that GetTokenizer serves, so that a frontend needs no model folder.

It does not know what is in them.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from engine_service.hf_overrides import overridden
from tidemill.runtime.errors import FailedPrecondition, NotFound

CHUNK_BYTES = 256 << 10
MAX_FILE_BYTES = 128 << 20
MAX_BYTES = 256 << 20
_ADVICE = "start the engine with --tokenizer FOLDER, or the frontend with its own --tokenizer"
_REQUIRED = ("tokenizer.json", "tokenizer.model", "vocab.json")
_CONFIG = "config.json"
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
    _CONFIG,
    "generation_config.json",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFiles:
    """`files` are (name, size); `sha256` is over their contents, one after the other."""

    folder: Path
    files: tuple[tuple[str, int], ...]
    sha256: str
    config: bytes | None = None
    """In the place of the config.json that lies there, where the operator says something over it;
    frontends read the names of labels in it."""

    def read(self, name: str) -> bytes:
        """A file of them, whole. Blocking."""
        with _opened(self.folder, name, self.config) as file:
            return file.read()

    def chunks(self, max_message_bytes: int) -> Iterator[tuple[int, bytes]]:
        """(index of the file, at most 256 KiB and half a message) in order. Blocking: it reads the
        disk."""
        size = max(1, min(CHUNK_BYTES, max_message_bytes // 2))
        for index, (name, _) in enumerate(self.files):
            with _opened(self.folder, name, self.config) as file:
                while content := file.read(size):
                    yield index, content


def read_tokenizer(folder: str, hf_overrides: Mapping[str, Any]) -> TokenizerFiles:
    """Hashes the files of `folder`. Blocking; raises NotFound or FailedPrecondition."""
    try:
        return _read(folder, hf_overrides)
    except OSError as failure:
        raise FailedPrecondition(
            f"the tokenizer cannot be read: {failure.filename}: {failure.strerror}; {_ADVICE}",
            reason="TOKENIZER_UNREADABLE",
        ) from failure


def _read(folder: str, hf_overrides: Mapping[str, Any]) -> TokenizerFiles:
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
    config = _config(root, hf_overrides) if _CONFIG in sizes else None
    if config is not None:
        sizes[_CONFIG] = len(config)
    digest = hashlib.sha256()
    for name in sizes:
        with _opened(root, name, config) as file:
            digest.update(file.read())
    return TokenizerFiles(
        folder=root, files=tuple(sizes.items()), sha256=digest.hexdigest(), config=config
    )


def _config(root: Path, hf_overrides: Mapping[str, Any]) -> bytes | None:
    """config.json under the overrides; None: it is served as it lies there, whatever it is."""
    if not hf_overrides:
        return None
    try:
        found = json.loads((root / _CONFIG).read_bytes())
    except (ValueError, RecursionError):
        return None
    return json.dumps(overridden(found, hf_overrides)).encode() if isinstance(found, dict) else None


def _opened(folder: Path, name: str, config: bytes | None) -> BinaryIO:
    if name == _CONFIG and config is not None:
        return io.BytesIO(config)
    return (folder / name).open("rb")

"""API keys: made once, kept as hashes, compared in constant time.

A key is 256 random bits, so one round of SHA-256 is enough to keep it: slow hashes (scrypt, argon2)
make up for secrets that people think of, and would cost every request milliseconds. It does not
know what a key opens.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from pathlib import Path
from typing import NamedTuple

from tidemill.runtime.errors import FailedPrecondition
from tidemill.security.watched import Watched
from tidemill.written import read_written

ONLY_KEY = "default"
"""The name of a key that was given without one."""
_PREFIX = "tm-"
_NUM_BYTES = 32
_HASH = "sha256:"
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_SENDABLE = re.compile(r"[!-~](?:[ -~]*[!-~])?")
"""What a header may hold whatever library writes it."""
_LOOK_S = 1.0


class NewKey(NamedTuple):
    """A key and the line that stands for it in a file."""

    key: str
    line: str


class _Entry(NamedTuple):
    name: str
    digest: bytes


def new_key(name: str) -> NewKey:
    """A random key for `name`. Raises FailedPrecondition for a name that no file takes."""
    _check_name(name)
    key = _PREFIX + secrets.token_urlsafe(_NUM_BYTES)
    return NewKey(key, f"{name} {_HASH}{_digest(key).hex()}")


class KeyRing:
    """Who is known. Keys of the same name are the same caller, which is how one is replaced."""

    def __init__(self, path: str | None = None, key: str | None = None) -> None:
        """`path`: a file of lines `NAME sha256:HEX`, read again within a second of a change;
        `key`: one more key, called default. Raises FailedPrecondition naming what is at fault."""
        if key is not None and not _SENDABLE.fullmatch(key):
            raise FailedPrecondition(
                f"--api-key has {len(key)} characters; it must have at least one, all of printable "
                "ASCII and no space at either end, or no client could send it; tidemill key new "
                "NAME makes one",
                reason="API_KEY",
                param="api_key",
            )
        self._own = [] if key is None else [_Entry(ONLY_KEY, _digest(key))]
        self._file: Watched[list[_Entry]] | None = None
        if path is not None:
            try:
                self._file = Watched([path], lambda: _read(path), interval_s=_LOOK_S)
            except (OSError, UnicodeDecodeError) as failure:
                raise FailedPrecondition(
                    f"cannot read --api-keys-file {path}: {failure}; write one with "
                    "tidemill key new NAME --file FILE",
                    reason="KEYS_FILE",
                    param="api_keys_file",
                ) from failure
            if not self._file.current():
                raise FailedPrecondition(
                    f"--api-keys-file {path} has no key, so nobody would be let in; make one with "
                    f"tidemill key new NAME --file {path}",
                    reason="KEYS_FILE",
                    param="api_keys_file",
                )

    @property
    def is_empty(self) -> bool:
        """Nobody was asked to show a key."""
        return self._file is None and not self._own

    def name_of(self, key: str) -> str | None:
        """Whose key this is. Every entry is compared, whichever fits: time tells nothing."""
        shown, found = _digest(key), None
        known = self._own if self._file is None else [*self._own, *self._file.current()]
        for entry in known:
            if hmac.compare_digest(entry.digest, shown):
                found = entry.name
        return found


def _read(path: str) -> list[_Entry]:
    entries = []
    for number, line in enumerate(read_written(Path(path)).splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        name, digest = words[0], words[1].removeprefix(_HASH) if len(words) == 2 else ""
        if not _NAME.fullmatch(name) or not _DIGEST.fullmatch(digest):
            raise FailedPrecondition(  # without the line: it may be a key by mistake
                f"line {number} of {path} is not NAME {_HASH}HEX with 64 hexadecimal digits; "
                "tidemill key new NAME prints such a line",
                reason="KEYS_FILE",
                param="api_keys_file",
            )
        entries.append(_Entry(name, bytes.fromhex(digest)))
    return entries


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise FailedPrecondition(
            f"{name[:80]!r} is no name for a key; take 1 to 64 letters, digits, '.', '_' or '-'",
            reason="KEY_NAME",
            param="name",
        )

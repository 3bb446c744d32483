"""`tidemill key new NAME`: makes an API key and the line of --api-keys-file that stands for it."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from tidemill.runtime import options
from tidemill.runtime.errors import FailedPrecondition
from tidemill.security.keys import new_key

_PRIVATE = 0o600


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyOptions:
    """Whose key, and where its line goes."""

    name: str
    """Who will have the key: 1 to 64 letters, digits, '.', '_' or '-'. Keys of one name share their
    limits; a second one lets a client change over before the first is deleted."""
    file: str | None = None
    """Append the line to this file, which is made if there is none; default: print the line."""


def run(argv: Sequence[str]) -> int:
    """Prints the key, which nobody can find out later; returns the exit status."""
    if not argv or argv[0] not in ("new", "-h", "--help"):
        print("usage: tidemill key new NAME [--file FILE]", file=sys.stderr)
        return 2
    words = argv[1:] if argv[0] == "new" else argv
    (wanted,) = options.parse([KeyOptions], words, prog="tidemill key new", positional="name")
    made = new_key(wanted.name)
    if wanted.file is None:
        print(f"{made.key}\n{made.line}")
        print("The first line is the key, the second is for --api-keys-file.", file=sys.stderr)
        return 0
    _append(wanted.file, made.line)
    print(made.key)
    return 0


def _append(path: str, line: str) -> None:
    """Adds a line to a file that only its owner reads, behind a last line that may lack its end."""
    try:
        number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, _PRIVATE)
        with os.fdopen(number, "a+", encoding="utf-8") as file:
            file.seek(0)
            before = file.read()
            file.write(("" if not before or before.endswith("\n") else "\n") + line + "\n")
    except (OSError, UnicodeDecodeError) as failure:
        raise FailedPrecondition(f"cannot write {path}: {failure}", param="file") from failure

"""Whether what is measured can be kept, asked before it is measured, which takes minutes."""

from __future__ import annotations

import os
from pathlib import Path

from tidemill.runtime.errors import FailedPrecondition


def check_place(file: Path, param: str) -> None:
    """Raises FailedPrecondition where the file could not be written."""
    if file.is_dir():
        raise FailedPrecondition(f"{file} is a folder: name a file in it", param=param)
    if not file.parent.is_dir():
        raise FailedPrecondition(f"{file.parent} is no folder: make it first", param=param)
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise FailedPrecondition(f"{file} may not be written: choose another file", param=param)

"""Text of files that people write and copy between systems. It does not know what is in them."""

from __future__ import annotations

from pathlib import Path


def read_written(path: Path) -> str:
    """UTF-8, without the mark (BOM) that editors of some systems put in front of it: JSON has no
    place for one, and a chat template or an API key would begin with it. Raises OSError, and
    UnicodeDecodeError for other bytes."""
    return path.read_text("utf-8-sig")

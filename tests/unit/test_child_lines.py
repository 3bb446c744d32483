"""Lines of a service that its supervisor reads, however long they are."""

from __future__ import annotations

import asyncio
import os

import pytest

from tidemill.commands import child
from tidemill.commands.child import Child

PROGRAM = "sys.stderr.write('before\\n' + 'x' * 1_000_000 + '\\nafter\\n')"


async def test_a_line_of_any_length_stops_neither_the_reader_nor_the_service(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The service stood still where it wrote: nobody read its pipe any more."""
    monkeypatch.setattr(child, "_LINE_BYTES", 1 << 16)
    lines: list[str] = []
    argv = ("-n1", "-r1", "-s", "import sys", PROGRAM)
    started = await Child.start("timeit", argv, environ=os.environ, on_line=lines.append)
    try:
        async with asyncio.timeout(20.0):
            assert await started.wait() == 0
    finally:
        started.kill()
    assert (lines[0], lines[-1]) == ("before", "after")
    assert any("line of more than 65536 bytes" in line for line in lines)

"""The profiler holds the engine up no longer than it must."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from engine_service.worker.profiler import PIECE_BYTES, TorchProfiler

STARTS = """
import sys
from engine_service.worker.profiler import TorchProfiler
profiler = TorchProfiler(records_cuda=False)
known = set(sys.modules)
profiler.start(sys.argv[1])
print(len(set(sys.modules) - known))
profiler.stop()
"""


def test_a_start_imports_nothing_large(tmp_path: Path) -> None:
    """torch's compiler is 900 modules, and takes longer than frontends wait for a silent core."""
    command = [sys.executable, "-c", STARTS, str(tmp_path)]
    told = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    assert int(told.stdout.split()[-1]) < 50


def test_others_are_told_where_it_holds_the_interpreter(tmp_path: Path) -> None:
    """Ranks that hear nothing of rank 0 for 2.5 s end it, with its profile."""
    told: list[str] = []

    @contextmanager
    def away() -> Iterator[None]:
        told.append(f"goes, {len(list(tmp_path.iterdir()))} files")
        yield
        told.append("is back")

    profiler = TorchProfiler(records_cuda=False, away=away)
    profiler.start(str(tmp_path))
    assert told == ["goes, 0 files", "is back"]
    assert len(profiler.stop()) == 1
    assert told == ["goes, 0 files", "is back"] * 2


def test_a_trace_is_compressed_in_large_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    write = gzip.GzipFile.write

    def counted(packed: gzip.GzipFile, piece: bytes) -> int:
        sizes.append(len(piece))
        return write(packed, piece)

    monkeypatch.setattr(gzip.GzipFile, "write", counted)
    profiler = TorchProfiler(records_cuda=False)
    profiler.start(str(tmp_path))
    number = torch.ones(3)
    for _ in range(3000):
        number = number + 1
    (written,) = profiler.stop()
    with gzip.open(written) as trace:
        names = [event.get("name") for event in json.load(trace)["traceEvents"]]
    assert names.count("aten::add") == 3000
    assert len(sizes) <= sum(sizes) // PIECE_BYTES + 1

"""Records what the device and the host do, step by step, as a Chrome trace.

It does not know steps: everything between start and stop is in it. The engine stands still while
it starts and stops, so it takes the short ways: `torch.profiler` imports all of torch's compiler
to start (3 s), and compresses what it recorded a line at a time (25 s for 100,000 operators).
"""

from __future__ import annotations

import gzip
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from torch.autograd.profiler import profile

from tidemill.runtime.errors import FailedPrecondition, InvalidRequest

PIECE_BYTES = 1 << 20
Away = Callable[[], AbstractContextManager[None]]


class TorchProfiler:
    """torch's profiler. Everything is kept in memory until `stop`: seconds, not minutes."""

    def __init__(self, *, records_cuda: bool, away: Away = nullcontext) -> None:
        """`away`: around what holds the interpreter for seconds."""
        self._away = away
        self._device = "cuda" if records_cuda else None
        self._running: tuple[profile, Path] | None = None

    def start(self, directory: str) -> None:
        """Raises InvalidRequest when nothing can be written there, and FailedPrecondition when it
        records already."""
        if self._running is not None:
            raise FailedPrecondition(
                f"a profile is being recorded for {self._running[1]}; stop it first",
                reason="PROFILING",
            )
        folder = Path(directory)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as failure:
            raise InvalidRequest(
                f"cannot write to {directory!r}: {failure.strerror}", param="directory"
            ) from failure
        if not os.access(folder, os.W_OK):
            raise InvalidRequest(f"cannot write to {directory!r}", param="directory")
        recorder = profile(use_device=self._device, use_kineto=True)
        with self._away():
            recorder.__enter__()
        self._running = (recorder, folder)

    def stop(self) -> list[str]:
        """The file that was written."""
        if self._running is None:
            raise FailedPrecondition("no profile is being recorded", reason="NOT_PROFILING")
        (recorder, folder), self._running = self._running, None
        path = folder / f"rank0-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.json.gz"
        with tempfile.TemporaryDirectory() as aside:
            plain = Path(aside) / "trace.json"
            with self._away():
                recorder.__exit__(None, None, None)
                recorder.export_chrome_trace(str(plain))
            with plain.open("rb") as read, gzip.open(path, "wb", compresslevel=1) as packed:
                shutil.copyfileobj(read, packed, PIECE_BYTES)
        return [str(path)]

"""Records what the device and the host do, step by step, as a Chrome trace.

It does not know steps: everything between start and stop is in it.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from tidemill.runtime.errors import FailedPrecondition, InvalidRequest


class TorchProfiler:
    """torch's profiler. Everything is kept in memory until `stop`: seconds, not minutes."""

    def __init__(self, *, records_cuda: bool) -> None:
        self._activities = [ProfilerActivity.CPU]
        if records_cuda:
            self._activities.append(ProfilerActivity.CUDA)
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
        recorder = profile(activities=self._activities)
        recorder.start()
        self._running = (recorder, folder)

    def stop(self) -> list[str]:
        """The file that was written."""
        if self._running is None:
            raise FailedPrecondition("no profile is being recorded", reason="NOT_PROFILING")
        (recorder, folder), self._running = self._running, None
        recorder.stop()
        path = folder / f"rank0-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.json.gz"
        recorder.export_chrome_trace(str(path))
        return [str(path)]

"""Benchmarks that start services end with them: whoever is ended first, nothing is left running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

WORDS = ("serve", "--model=demo", "--executor=simulated", "--concurrency=2", "--warm-up-s=0")
pytestmark = pytest.mark.slow


@contextmanager
def bench(tmp_path: Path, seconds: int) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tidemill", "bench", *WORDS, f"--seconds={seconds}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def below(process: subprocess.Popen[str], role: str) -> list[psutil.Process]:
    every = psutil.Process(process.pid).children(recursive=True)
    return [one for one in every if role in one.cmdline()]


def wait_until(is_so: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < give_up
        time.sleep(0.2)


def is_under_load(process: subprocess.Popen[str]) -> bool:
    """The client process is there once the services are ready."""
    every = psutil.Process(process.pid).children()
    return any("spawn_main" in " ".join(one.cmdline()) for one in every)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_what_was_started(tmp_path: Path, number: signal.Signals) -> None:
    with bench(tmp_path, 300) as process:
        wait_until(lambda: is_under_load(process))
        every = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(number)
        assert process.wait(60) == 128 + number
        assert len(every) > 3
        _, alive = psutil.wait_procs(every, timeout=20)
    assert alive == []
    assert list(tmp_path.glob("tidemill-log-*")) == []


def test_services_that_end_meanwhile_are_told(tmp_path: Path) -> None:
    """Not as requests that failed, behind which a run has succeeded."""
    with bench(tmp_path, 8) as process:
        wait_until(lambda: is_under_load(process))
        (supervisor,) = [one for one in below(process, "serve") if "bench" not in one.cmdline()]
        supervisor.kill()
        output, _ = process.communicate(timeout=90)
    assert process.returncode == 1, output
    assert "a service has ended meanwhile" in output

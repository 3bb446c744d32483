"""What `tidemill serve` writes, where nothing can be written."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tidemill.commands.screen import Screen

FULL = Path("/dev/full")


@pytest.mark.skipif(not FULL.exists(), reason="needs a device that is always full")
def test_a_full_disk_costs_lines_and_not_the_services(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reads a service's lines goes on reading, or the service stops at a full pipe."""
    full = FULL.open("w", buffering=1)
    monkeypatch.setattr(sys, "stderr", full)
    with pytest.raises(OSError, match="No space left"):
        print("the control", file=sys.stderr, flush=True)
    screen = Screen("tidemill serve", ["engine"])
    screen.line("engine", "a line", {})
    screen.restarts("engine", "ended with status 1", 1.0)
    with pytest.raises(OSError, match="No space left"):
        full.close()


def test_what_was_not_written_is_still_known(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    screen = Screen("tidemill serve", ["engine"])
    monkeypatch.setattr(screen._console, "print", _no_space)
    screen.line("engine", "the reason", {})
    screen.died("engine", "ended with status 1")
    assert capsys.readouterr().err == "tidemill serve: engine ended with status 1: the reason\n"


def _no_space(*_: object, **__: object) -> None:
    raise OSError(28, "No space left on device")

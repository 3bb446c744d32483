"""What `tidemill serve` writes, where nothing can be written."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tidemill.commands.screen import Screen
from tidemill.runtime import log

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


REFUSED = json.dumps(
    {"time": "2026-01-01T00:00:00.000Z", "level": "error", "service": "engine", "logger": "l"}
    | {"message": "cannot start: too small"}
    | log.START_REFUSED
)


def test_why_a_service_cannot_start_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen("tidemill serve", ["engine"])
    screen.line("engine", REFUSED, {})
    assert capsys.readouterr().err == ""
    screen.died("engine", "ended with status 1")
    screen.rest()
    told = "tidemill serve: engine ended with status 1: cannot start: too small\n"
    assert capsys.readouterr().err == told


def test_a_refusal_is_not_lost_where_no_end_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """All is ending already, for another reason."""
    screen = Screen("tidemill serve", ["engine", "other"])
    screen.line("engine", REFUSED, {})
    screen.died("other", "was killed by SIGKILL")
    screen.rest()
    killed, refused = capsys.readouterr().err.splitlines()
    assert (killed, refused) == ("tidemill serve: other was killed by SIGKILL", REFUSED)


def test_other_errors_of_a_service_are_lines_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen("tidemill serve", ["engine"])
    line = json.dumps({k: v for k, v in json.loads(REFUSED).items() if k not in log.START_REFUSED})
    screen.line("engine", line, {})
    assert capsys.readouterr().err == line + "\n"


def _no_space(*_: object, **__: object) -> None:
    raise OSError(28, "No space left on device")

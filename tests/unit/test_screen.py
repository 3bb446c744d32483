"""What `tidemill serve` writes, where nothing can be written."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path

import pytest

from tidemill.commands import run_batch
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


@pytest.mark.parametrize("changed", [{"service": None}, {"time": 1}, {"message": {"text": "a"}}])
def test_what_a_library_logs_in_json_is_a_line_like_any_other(
    changed: dict[str, object], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its reader would end with it on a terminal, and the service at a full pipe."""
    screen = Screen("tidemill serve", ["engine"])
    monkeypatch.setattr(type(screen._console), "is_terminal", True)
    line = json.dumps(json.loads(REFUSED) | changed)
    screen.line("engine", line, {})
    assert capsys.readouterr().err == line + "\n"


def test_other_errors_of_a_service_are_lines_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen("tidemill serve", ["engine"])
    line = json.dumps({k: v for k, v in json.loads(REFUSED).items() if k not in log.START_REFUSED})
    screen.line("engine", line, {})
    assert capsys.readouterr().err == line + "\n"


def _no_space(*_: object, **__: object) -> None:
    raise OSError(28, "No space left on device")


def test_lines_pass_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    line = '{"level": "info", "message": "[b]:smile: 2001:db8::a:5", "long": "' + 300 * "x" + '"}'
    Screen("tidemill serve", ["engine"]).line("engine", line, {})
    assert capsys.readouterr().err == line + "\n"


def test_who_reads_no_more_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """`tidemill serve 2>&1 | head`: the services go on."""
    reader, writer = os.pipe()
    os.close(reader)
    gone = os.fdopen(writer, "w", buffering=1)
    monkeypatch.setattr(sys, "stderr", gone)
    with pytest.raises(BrokenPipeError):
        print("the control", file=sys.stderr, flush=True)
    screen, before = Screen("tidemill serve", ["engine"]), os.fstat(1)
    for _ in range(3):
        screen.line("engine", "a line", {})
    run_batch.Screen("http://127.0.0.1", 3).tell_pause("HTTP 429")
    assert os.path.samestat(before, os.fstat(1)), "the other output stays what it is"
    with contextlib.suppress(OSError):
        gone.close()

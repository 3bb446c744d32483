"""collect-env answers every question, and never fails."""

import json
import os
import sys

import pytest

from tidemill.commands import collect_env


def answers(capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    assert collect_env.run(["--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert isinstance(told, dict)
    return told


def test_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert collect_env.run([]) == 0
    text = capsys.readouterr().out
    assert "python: 3." in text
    assert "  grpcio: " in text


def test_without_torch(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert "cannot tell: ModuleNotFoundError" in str(answers(capsys)["torch"])


def test_broken_questions(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(name: str) -> int:
        raise OSError("no such number")

    monkeypatch.setattr(os, "sysconf", broken)
    assert answers(capsys)["memory"] == "cannot tell: OSError: no such number"


def test_environment(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEMILL_PAGE_SIZE", "32")
    monkeypatch.setenv("TIDEMILL_PAEG_SIZE", "32")
    monkeypatch.setenv("TIDEMILL_DATA_PARALLEL_SIZE", "2")
    monkeypatch.setenv("TIDEMILL_CONFIG", "tidemill.yaml")
    monkeypatch.setenv("HF_TOKEN", "hush")
    shown = answers(capsys)["environment"]
    assert isinstance(shown, dict)
    assert shown["TIDEMILL_PAGE_SIZE"] == "32"
    assert shown["TIDEMILL_DATA_PARALLEL_SIZE"] == "2"
    assert shown["TIDEMILL_CONFIG"] == "tidemill.yaml"
    assert shown["TIDEMILL_PAEG_SIZE"] == "32 (no such setting)"
    assert shown["HF_TOKEN"] == "(hidden)"

"""Where compiled kernels of FlashAttention 4 and QuACK are kept."""

from __future__ import annotations

import errno
import logging
import tempfile
from pathlib import Path
from typing import Any

import pytest

from engine_service.kernels.cute_dsl import keep_compiled

FLASH, QUACK = "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", "QUACK_CACHE_DIR"
KEEPS = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"


def test_both_libraries_keep_what_they_compile_below_the_users_cache(tmp_path: Path) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    keep_compiled(environ)
    assert environ[KEEPS] == "1"
    for name, folder in ((FLASH, "flash-attention"), (QUACK, "quack")):
        assert environ[name] == str(tmp_path / "tidemill" / folder)
        assert Path(environ[name]).is_dir()


def test_without_a_cache_folder_named_it_is_the_homes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    environ: dict[str, str] = {}
    keep_compiled(environ)
    assert environ[QUACK] == str(tmp_path / ".cache" / "tidemill" / "quack")


def test_what_the_environment_says_stays(tmp_path: Path) -> None:
    said = {FLASH: "/nowhere/flash", QUACK: "/nowhere/quack", KEEPS: "0"}
    environ = {"XDG_CACHE_HOME": str(tmp_path), **said}
    keep_compiled(environ)
    assert {name: environ[name] for name in said} == said
    assert not (tmp_path / "tidemill").exists()


def test_a_folder_that_cannot_be_made_is_told_and_nothing_is_changed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "tidemill").write_text("in the way")
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    with caplog.at_level(logging.WARNING, "tidemill.rank"):
        keep_compiled(environ)
    assert environ == {"XDG_CACHE_HOME": str(tmp_path)}
    assert f"not kept, set {FLASH} and {QUACK}" in caplog.text


def test_a_folder_that_is_there_but_cannot_be_written_is_told_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of both is enough: libraries then keep what they keep by themselves."""
    real = tempfile.NamedTemporaryFile

    def refused(dir: Path) -> Any:
        if dir.name == "quack":
            raise OSError(errno.EROFS, "Read-only file system", str(dir))
        return real(dir=dir)

    said = {"XDG_CACHE_HOME": str(tmp_path)}
    keep_compiled(control := dict(said))
    assert KEEPS in control
    monkeypatch.setattr(tempfile, "NamedTemporaryFile", refused)
    with caplog.at_level(logging.WARNING, "tidemill.rank"):
        keep_compiled(environ := dict(said))
    assert environ == said
    assert f"not kept, set {FLASH} and {QUACK}: [Errno 30] Read-only" in caplog.text
    assert not [path for path in tmp_path.rglob("*") if path.is_file()], "nothing is left behind"

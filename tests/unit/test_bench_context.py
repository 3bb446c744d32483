"""What stands at the head of every benchmark's file: which card, too."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from engine_service.attention import select
from tidemill.bench import context as of_context
from tidemill.bench.context import context


def install(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's program."""
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.delitem(sys.modules, "torch", raising=False)


@pytest.mark.parametrize(
    ("script", "gpu"),
    [
        ("echo NVIDIA H200; echo NVIDIA H200", "NVIDIA H200"),
        ("echo NVIDIA H200; echo NVIDIA L40S", "NVIDIA H200, NVIDIA L40S"),
        ("exit 9", None),
        ("true", None),
    ],
)
def test_a_process_without_torch_asks_the_driver(
    script: str, gpu: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where services of their own have the model, the file names the card all the same."""
    install(tmp_path, script, monkeypatch)
    assert context("serve")["gpu"] == gpu


def test_a_host_without_a_driver_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "echo NVIDIA H200", monkeypatch)
    (tmp_path / "nvidia-smi").unlink()
    assert context("serve")["gpu"] is None


def test_every_attention_library_that_can_be_chosen_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A figure with another generation of FlashAttention looked like one without any."""
    monkeypatch.setattr(of_context.metadata, "version", lambda package: "1.2.3")
    told = context("throughput")["packages"]
    assert {library.distribution for library in select._FLASH.values()} <= set(told)

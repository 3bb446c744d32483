"""Memory that a GPU reads by itself: registered for as long as it is there, where a GPU is."""

from __future__ import annotations

import gc
import mmap
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from engine_service.worker.pinned import pinned

CUDA = torch.device("cuda", 0)
SIZE = 8192


class Driver:
    """Of the CUDA runtime."""

    def __init__(self, fault: int = 0) -> None:
        self.fault = fault
        self.known: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if not self.fault:
            self.known[address] = size
        return self.fault

    def cudaHostUnregister(self, address: int) -> None:
        del self.known[address]


def install(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What else is asked of the device."""
    asked: list[str] = []

    def zeros(*sizes: int, device: torch.device) -> torch.Tensor:
        asked.append(str(device))
        raise RuntimeError("the error of before")

    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch, "zeros", zeros)
    return asked


def test_memory_is_registered_until_it_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    asked = install(driver, monkeypatch)
    memory = mmap.mmap(-1, SIZE)
    held = SimpleNamespace(one=pinned(memory, CUDA))
    assert list(driver.known.values()) == [SIZE]
    assert not asked
    # As long as it is registered it cannot be given back under the device.
    with pytest.raises(BufferError):
        memory.close()
    held.one = None
    gc.collect()
    assert not driver.known
    memory.close()


def test_memory_that_is_refused_stays_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And whoever launches next does not hear of it."""
    driver = Driver(fault=2)
    asked = install(driver, monkeypatch)
    memory = mmap.mmap(-1, SIZE)
    assert pinned(memory, CUDA) is None
    assert asked == ["cuda:0"]
    assert "cudaHostRegister of 8192 bytes: 2" in caplog.text


def test_no_gpu_needs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    install(driver, monkeypatch)
    assert pinned(mmap.mmap(-1, SIZE), torch.device("cpu")) is None
    assert not driver.known

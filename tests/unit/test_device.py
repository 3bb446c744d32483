"""The device that a rank opens, where torch or its kernels do not run on it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine_service.worker import device as devices
from tidemill.runtime.errors import Unsupported


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """A V100 at cuda:0, and who has been asked whether Triton runs there."""
    asked: list[torch.device] = []
    monkeypatch.setattr(devices, "pick_device", lambda *_: torch.device("cuda", 0))
    monkeypatch.setattr(devices, "tell_kernel_fault", asked.append)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 0))
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_90"])
    return asked


def failing(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    def fail(*args: Any, **named: Any) -> torch.Tensor:
        raise RuntimeError(text)

    monkeypatch.setattr(torch, "ones", fail)


def test_a_gpu_that_torch_has_no_kernels_for_is_refused_by_name(
    told: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, "CUDA error: no kernel image is available for execution on the device")
    with pytest.raises(Unsupported) as caught:
        devices.open_device("cuda")
    assert caught.value.param == "device"
    assert f"torch {torch.__version__} has no kernels for cuda:0" in caught.value.message
    assert "capability 7.0, only for sm_75, sm_90" in caught.value.message
    assert not told


def test_control_other_failures_stay_and_a_gpu_that_works_is_opened(
    told: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:
        failing(broken, "CUDA error: an illegal memory access was encountered")
        with pytest.raises(RuntimeError, match="illegal memory access"):
            devices.open_device("cuda")
    real = torch.ones
    monkeypatch.setattr(torch, "ones", lambda size, device: real(size))
    assert devices.open_device("cuda") == torch.device("cuda", 0)
    assert told == [torch.device("cuda", 0)]

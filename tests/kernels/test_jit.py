"""Whether kernels run on a device, and what happens where they do not."""

from __future__ import annotations

import logging
import subprocess
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine_service.kernels import jit
from engine_service.worker import worker
from tidemill.llm import LLM
from tidemill.sampling_params import SamplingParams

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 7)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A GPU of compute capability 8.9 that nobody has asked about; kernels on it do nothing."""
    monkeypatch.setattr(jit, "_FAULTS", {})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    monkeypatch.setattr(jit, "_doubled_ones", lambda device: torch.full((4,), 2.0))
    return monkeypatch


def fake(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Any:
    return SimpleNamespace(is_cuda=device.type == "cuda", dtype=dtype, device=device)


def test_a_working_gpu_runs_all_formats_but_float64(gpu: pytest.MonkeyPatch) -> None:
    assert jit.kernel_fault(CUDA) is None
    assert jit.runs_triton(fake(CUDA))
    assert jit.runs_triton(fake(CUDA, torch.int64))
    assert not jit.runs_triton(fake(CUDA, torch.float64))
    assert not jit.runs_triton(torch.ones(2))


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (RuntimeError("Failed to find C compiler.\n Please"), "find C compiler. Please"),
        (subprocess.CalledProcessError(1, ["/usr/bin/gcc", "x.c"]), "python3-dev): /usr/bin/gcc"),
        (RuntimeError("Triton Error [CUDA]: device kernel image is invalid"), "image is invalid"),
        (RuntimeError("PassManager::run failed"), "RuntimeError: PassManager::run failed"),
    ],
)
def test_a_kernel_that_does_not_run_is_told_and_asked_once(
    error: Exception, told: str, gpu: pytest.MonkeyPatch
) -> None:
    calls: list[torch.device] = []

    def fail(device: torch.device) -> torch.Tensor:
        calls.append(device)
        raise error

    gpu.setattr(jit, "_doubled_ones", fail)
    assert told in (jit.kernel_fault(CUDA) or "")
    assert not jit.runs_triton(fake(CUDA))
    assert calls == [CUDA]
    assert jit.is_kernel_failure(error)
    assert not jit.is_kernel_failure(RuntimeError("CUDA error: an illegal memory access"))


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("full"), RuntimeError("Triton Error [CUDA]: out of memory")]
)
def test_memory_that_runs_out_says_nothing_about_kernels(
    error: Exception, gpu: pytest.MonkeyPatch
) -> None:
    def fail(device: torch.device) -> torch.Tensor:
        raise error

    with gpu.context() as full:
        full.setattr(jit, "_doubled_ones", fail)
        with pytest.raises(type(error), match=str(error).split("[")[0]):
            jit.kernel_fault(CUDA)
    assert jit.kernel_fault(CUDA) is None, "it is asked again"


def test_other_reasons_against_kernels(gpu: pytest.MonkeyPatch) -> None:
    gpu.setattr(jit, "_doubled_ones", lambda device: torch.ones(4))
    assert jit.kernel_fault(CUDA) == "Triton's kernels compute wrong numbers"
    gpu.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert "needs compute capability 8.0, this is 7.5" in str(jit._find_fault(CUDA))
    gpu.setattr(jit, "INTERPRETED", False)
    assert jit._find_fault(CPU) == "Triton's kernels run on CUDA devices"
    gpu.setattr(jit, "triton", None)
    assert "pip install triton" in str(jit._find_fault(CUDA))
    assert not jit.is_kernel_failure(RuntimeError("Triton Error"))


def test_the_kernel_that_tries_a_device_doubles() -> None:
    x = torch.ones(32, device="cuda" if torch.cuda.is_available() else "cpu")
    jit._double_kernel[(1,)](x, SIZE=32, PDL=False)
    assert (x == 2.0).all()


def test_a_kernel_that_fails_in_the_profile_is_done_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The CPU plays the device. Where kernels are given up already, the failure is raised."""
    monkeypatch.setattr(jit, "_FAULTS", {CPU: None})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a device")
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    real, tried, kept = worker.find_room, [], []

    def find_room(*args: Any) -> Any:
        tried.append(args[3].name)
        kept.append(weakref.ref(args[3]))
        if len(tried) == 1:
            raise jit.triton.runtime.errors.OutOfResources(200_000, 101_376, "shared memory")
        assert [backend() is None for backend in kept] == [True, False], "the first is given up"
        return real(*args)

    config = {"device": "cpu", "max_model_len": 64, "max_rows": 2}
    expected = LLM("demo", **config).generate([[40, 41]], params, use_tqdm=False)
    monkeypatch.setattr(worker, "find_room", find_room)
    with caplog.at_level(logging.WARNING, "tidemill.rank"):
        llm = LLM("demo", **config)
    assert len(tried) == 2
    (record,) = caplog.records
    assert "a device: plain torch computes instead" in record.getMessage()
    assert "OutOfResources: out of resource: shared memory" in record.getMessage()
    outputs = llm.generate([[40, 41]], params, use_tqdm=False)
    assert outputs[0].outputs[0].token_ids == expected[0].outputs[0].token_ids
    tried.clear()
    with pytest.raises(jit.triton.runtime.errors.OutOfResources):
        LLM("demo", **config)


@pytest.mark.parametrize(
    ("compute", "stages"), [((9, 0), 4), ((8, 0), 4), ((8, 9), 2), ((12, 0), 2)]
)
def test_pipelines_are_shorter_where_shared_memory_is_small(
    compute: tuple[int, int], stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = torch.device("cuda", 70 + sum(compute))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: compute)
    assert jit.fitting_stages(4, device) == stages
    assert jit.fitting_stages(1, device) == 1
    assert jit.fitting_stages(4, torch.device("cpu")) == 4

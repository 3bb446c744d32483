"""The choice of an attention library: a table of machines, and what happens when one fails."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any, get_args, get_type_hints

import pytest
import torch

from engine_service.attention import select
from engine_service.attention.base import AttentionBackend, AttentionShape
from engine_service.attention.probe import probe
from engine_service.attention.reference import ReferenceBackend
from engine_service.attention.sdpa import SdpaBackend
from engine_service.attention.select import (
    Capability,
    create_backend,
    open_backend,
    rank_backends,
)
from engine_service.config import EngineConfig
from tidemill.runtime.errors import Unsupported

CPU = torch.device("cpu")
FLASH4, FLASH3 = {"flash-attn-4": "4.0.0b36"}, {"flash-attn-3": "3.0.0"}
FLASH2 = {"flash-attn": "2.8.3"}
H200 = Capability(
    device_type="cuda",
    compute=(9, 0),
    dtype=torch.bfloat16,
    head_dim=128,
    page_size=64,
    installed={},
    kernel_fault=None,
)
NOT_HERE = "Triton's kernels run on CUDA devices"
NO_TRITON = "Triton is not installed (pip install triton)"
HOST = dataclasses.replace(
    H200, device_type="cpu", compute=None, dtype=torch.float32, kernel_fault=NOT_HERE
)
SHAPE = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=16, page_size=16, dtype=torch.float32)


def machine(base: Capability, **changes: Any) -> Capability:
    return dataclasses.replace(base, **changes)


@pytest.mark.parametrize(
    ("base", "changes", "ranked", "reason"),
    [
        (H200, {}, "triton sdpa", "FlashAttention is not installed (pip install 'tidemill[fl"),
        (H200, {"installed": FLASH4}, "flash4 triton sdpa", ""),
        (H200, {"installed": FLASH4 | FLASH3}, "flash4 flash3 triton sdpa", ""),
        (H200, {"installed": FLASH2}, "triton sdpa", "multiples of 256, not 64"),
        (H200, {"installed": FLASH2, "page_size": 256}, "flash2 triton sdpa", ""),
        (H200, {"installed": FLASH4, "dtype": torch.float32}, "triton sdpa", "no float32"),
        (H200, {"installed": FLASH4, "dtype": torch.float64}, "sdpa", "no float64"),
        (H200, {"installed": FLASH4, "head_dim": 256}, "flash4 triton sdpa", ""),
        (H200, {"installed": FLASH4, "head_dim": 100}, "triton sdpa", "up to 256, not 100"),
        (H200, {"installed": FLASH4, "head_dim": 320}, "sdpa", "up to 256, not 320"),
        (H200, {"installed": FLASH4, "kernel_fault": NO_TRITON}, "sdpa", "Triton is not installed"),
        (H200, {"installed": FLASH4, "compute": (8, 0)}, "triton sdpa", "10.x, 11.x, this is 8.0"),
        (H200, {"installed": FLASH3, "compute": (10, 0)}, "triton sdpa", "9.x, this is 10.0"),
        (H200, {"installed": FLASH4, "compute": (10, 0)}, "flash4 triton sdpa", ""),
        (
            H200,
            {"installed": FLASH4, "compute": (10, 0), "head_dim": 192},
            "triton sdpa",
            "up to 128, not 192",
        ),
        (HOST, {}, "sdpa", ""),
        (HOST, {"installed": FLASH4, "kernel_fault": None}, "sdpa", ""),
    ],
)
def test_auto(base: Capability, changes: dict[str, Any], ranked: str, reason: str) -> None:
    choices = rank_backends("auto", machine(base, **changes))
    assert " ".join(choice.name for choice in choices) == ranked
    assert (reason in choices[0].reason) if reason else (choices[0].reason == "")


@pytest.mark.parametrize(
    ("requested", "base", "changes", "ranked"),
    [
        ("flash", H200, {"installed": FLASH4 | FLASH3}, "flash4 flash3"),
        ("triton", H200, {"installed": FLASH4}, "triton"),
        ("triton", HOST, {"kernel_fault": None}, "triton"),
        ("sdpa", H200, {}, "sdpa"),
        ("sdpa", HOST, {"kernel_fault": NO_TRITON}, "sdpa"),
        ("reference", H200, {}, "reference"),
    ],
)
def test_requested(requested: str, base: Capability, changes: dict[str, Any], ranked: str) -> None:
    choices = rank_backends(requested, machine(base, **changes))
    assert " ".join(choice.name for choice in choices) == ranked


@pytest.mark.parametrize(
    ("requested", "base", "changes", "told"),
    [
        ("flash", H200, {}, r"pip install 'tidemill\[flash\]'.*pass .* auto or triton or sdpa"),
        ("flash", H200, {"installed": FLASH4, "dtype": torch.float32}, "no float32.*triton"),
        ("flash", HOST, {"installed": FLASH4}, "runs on CUDA devices; pass .* auto or sdpa$"),
        ("triton", HOST, {}, "run on CUDA devices; pass --attention-backend auto or sdpa"),
        (
            "triton",
            HOST,
            {"kernel_fault": None, "dtype": torch.bfloat16},
            "interpreter has no bfloat16; pass .* auto or sdpa",
        ),
        ("triton", H200, {"kernel_fault": NO_TRITON}, "pip install triton.*auto or sdpa$"),
        ("flashinfer", H200, {}, "'flashinfer'.*not part of this build.*auto or triton or sdpa"),
    ],
)
def test_refused(requested: str, base: Capability, changes: dict[str, Any], told: str) -> None:
    with pytest.raises(Unsupported, match=told) as caught:
        rank_backends(requested, machine(base, **changes))
    assert caught.value.param == "attention_backend"


def test_a_device_without_a_library_is_refused() -> None:
    with pytest.raises(Unsupported, match="mps"):
        rank_backends("auto", machine(HOST, device_type="mps"))


def test_the_flag_lists_what_there_is() -> None:
    listed = get_args(get_type_hints(EngineConfig)["attention_backend"])
    assert listed == ("auto", *select._LIBRARIES)
    for names in select._LIBRARIES.values():
        assert all(name in select._BACKENDS for name in names)


@pytest.mark.parametrize("name", ["sdpa", "reference"])
def test_a_library_that_works_passes_the_probe(name: str) -> None:
    assert create_backend(name, SHAPE).name == name
    assert probe(create_backend(name, SHAPE), CPU, windows=[None, 8]) is None


class Stub(SdpaBackend):
    """A library with a fault; `fault` is what it does to an output."""

    fault = staticmethod(torch.clone)

    def attend(self, q_THD: torch.Tensor, **rest: Any) -> torch.Tensor:
        return self.fault(super().attend(q_THD, **rest))


class DoesNotCompile(Stub):
    @staticmethod
    def fault(out: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("at 12:4:\n  tl.dot(q, k)\nfailed to find a C compiler")


class GivesNaN(Stub):
    @staticmethod
    def fault(out: torch.Tensor) -> torch.Tensor:
        return out * float("nan")


class IsWrong(Stub):
    @staticmethod
    def fault(out: torch.Tensor) -> torch.Tensor:
        return torch.cat([out[1:], out[:1]])


FAULTS = [
    (DoesNotCompile, "RuntimeError: at 12:4: tl.dot(q, k) failed to find a C compiler"),
    (GivesNaN, "wrong numbers for 70 queries (window None): off by nan"),
    (IsWrong, "wrong numbers for 70 queries"),
]


@pytest.mark.parametrize(("kind", "told"), FAULTS)
def test_the_probe_says_what_is_wrong(kind: type[Stub], told: str) -> None:
    assert told in (probe(kind(SHAPE), CPU, windows=[None]) or "")
    assert probe(Stub(SHAPE), CPU, windows=[None]) is None


@pytest.mark.parametrize(
    "text", ["CUDA error: out of memory", "Triton Error [CUDA]: out of memory"]
)
def test_memory_that_runs_out_is_no_librarys_fault(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(out: torch.Tensor) -> torch.Tensor:
        raise RuntimeError(text)

    monkeypatch.setattr(Stub, "fault", staticmethod(full))
    with pytest.raises(RuntimeError, match="out of memory"):
        probe(Stub(SHAPE), CPU, windows=[None])


@pytest.fixture
def cuda_like(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """`open_backend` believes in a GPU with two libraries, and computes on the CPU."""
    seen = machine(H200, installed=FLASH4, dtype=torch.float32)
    monkeypatch.setattr(select, "read_capability", lambda shape, device: seen)
    monkeypatch.setitem(select._BACKENDS, "triton", ReferenceBackend)
    return monkeypatch


@pytest.mark.parametrize(("kind", "told"), FAULTS)
def test_auto_moves_on_and_says_why(
    cuda_like: pytest.MonkeyPatch, kind: type[Stub], told: str
) -> None:
    backend, reason = open_backend("auto", SHAPE, CPU, windows=[None])
    assert type(backend) is ReferenceBackend
    assert reason == "triton: flash-attn-4 4.0.0b36 has no float32"
    cuda_like.setitem(select._BACKENDS, "triton", kind)
    backend, reason = open_backend("auto", SHAPE, CPU, windows=[None])
    assert type(backend) is SdpaBackend
    assert reason.startswith("sdpa: flash-attn-4 4.0.0b36 has no float32; triton failed: ")
    assert told in reason


def test_a_library_that_does_not_import_is_passed_over(cuda_like: pytest.MonkeyPatch) -> None:
    def broken(shape: AttentionShape) -> AttentionBackend:
        raise ImportError("libcudart.so.13: cannot open shared object file")

    cuda_like.setitem(select._BACKENDS, "triton", broken)
    backend, reason = open_backend("auto", SHAPE, CPU, windows=[None])
    assert type(backend) is SdpaBackend
    assert "triton does not import: ImportError: libcudart.so.13" in reason


def test_a_requested_library_that_fails_is_an_error(cuda_like: pytest.MonkeyPatch) -> None:
    cuda_like.setitem(select._BACKENDS, "triton", DoesNotCompile)
    with pytest.raises(Unsupported, match=r"'triton' does not work here: .*C compiler.*sdpa"):
        open_backend("triton", SHAPE, CPU, windows=[None])


def test_when_nothing_works_every_reason_is_told(cuda_like: pytest.MonkeyPatch) -> None:
    cuda_like.setitem(select._BACKENDS, "triton", DoesNotCompile)
    cuda_like.setitem(select._BACKENDS, "sdpa", GivesNaN)
    with pytest.raises(Unsupported, match=r"triton failed: .*C compiler.*; sdpa failed: .*nan"):
        open_backend("auto", SHAPE, CPU, windows=[None])


def test_a_broken_flash_is_passed_over_before_it_served_a_request(
    cuda_like: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """FlashBackend hides failures from running engines, not from the start-up check."""

    def load() -> select.FlashCall:
        def call(*args: object) -> torch.Tensor:
            raise RuntimeError("no cubin for this device")

        return call

    seen = machine(H200, installed=FLASH4)
    cuda_like.setattr(select, "read_capability", lambda shape, device: seen)
    cuda_like.setattr(select, "TritonBackend", ReferenceBackend)
    cuda_like.setitem(select._BACKENDS, "flash4", lambda shape: select._flash(load, shape))
    with caplog.at_level(logging.WARNING):
        backend, reason = open_backend("auto", SHAPE, CPU, windows=[None])
    assert type(backend) is ReferenceBackend
    assert "flash4 failed: RuntimeError: no cubin for this device" in reason
    assert not caplog.records
    with pytest.raises(Unsupported, match=r"'flash' does not work here: .*no cubin.*triton"):
        open_backend("flash", SHAPE, CPU, windows=[None])


def test_the_log_says_when_nothing_speaks_against_a_choice() -> None:
    assert open_backend("auto", SHAPE, CPU, windows=[None])[1] == "sdpa: the best here"
    assert open_backend("reference", SHAPE, CPU, windows=[None])[1] == "reference: requested"

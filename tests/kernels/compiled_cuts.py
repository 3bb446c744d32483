"""The cuts of paged attention that shared memory decides, as the device that they are compiled for
gets them, and one that only larger ones have. It needs `tests.kernels.compiling` as its plugin, and
is not collected otherwise."""

from __future__ import annotations

import pytest
import torch
from triton.backends.nvidia.compiler import CUDABackend

from engine_service.kernels import jit, paged_attention, paged_decode
from engine_service.kernels.paged_tiles import Spans
from tests.kernels import compiling

GROUP, PAGE = 2, 64
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def without_assembler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shared memory is known before it, and it takes most of the time."""
    monkeypatch.setattr(CUDABackend, "make_cubin", lambda *_: b"none")
    monkeypatch.setattr(compiling, "usage", lambda kernel: {"shared": kernel.metadata.shared})
    compiling._SEEN.clear()


def operands(count: int, head_dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    k, v = (torch.zeros(1, 1, PAGE, head_dim, dtype=dtype).transpose(1, 2) for _ in "kv")
    return torch.zeros(count, GROUP, head_dim, dtype=dtype), k, v


def spans(count: int) -> Spans:
    whole = torch.ones(1, dtype=torch.int32)
    return Spans(whole, torch.arange(count), whole, whole, whole[None])


@pytest.mark.parametrize("shared", [None, jit.MOST_SHARED])
def test_half_formats_long(shared: int | None) -> None:
    """The second one is the control."""
    tiles = None if shared is None else paged_attention.long_tiles(256, torch.bfloat16, shared)
    paged_attention.paged_attention_triton(
        *operands(64, 256, torch.bfloat16), spans(64), scale=1.0, window=None, tiles=tiles
    )


def test_float32_long() -> None:
    paged_attention.paged_attention_triton(
        *operands(64, 256, torch.float32), spans(64), scale=1.0, window=None
    )


@pytest.mark.parametrize(
    ("head_dim", "dtype", "rows"),
    [(128, torch.float32, 128), (256, torch.float32, 64), (256, torch.bfloat16, 128)],
)
def test_short(head_dim: int, dtype: torch.dtype, rows: int) -> None:
    shared = jit.shared_memory(CPU)
    paged_decode.paged_decode_triton(
        *operands(rows // GROUP, head_dim, dtype),
        spans(rows // GROUP),
        scale=1.0,
        window=None,
        tiles=paged_decode.short_tiles(rows, head_dim, dtype, shared=shared),
        parts=paged_decode.new_parts(1, 1, 2, rows, head_dim, CPU),
    )

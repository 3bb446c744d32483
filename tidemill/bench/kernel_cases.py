"""The kernels that are measured, except those of attention, experts and choices: sizes, inputs, and
what eager PyTorch would do.

Bytes are what has to be read and written once. It does not measure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.nn import functional

from engine_service.kernels.activation import silu_mul
from engine_service.kernels.embedding import gather_embeddings, gather_embeddings_ref
from engine_service.kernels.norm import add_rms_norm, add_rms_norm_ref, rms_norm, rms_norm_ref
from engine_service.kernels.qk_rope_store import qk_rope_store
from engine_service.kernels.rotary import rotary_angles_ref, rotate_ref
from engine_service.kernels.small_linear import small_linear_triton

_EPS = 1e-6
_HEADS, _KV_HEADS, _HEAD_DIM = 32, 8, 128
VOCAB = 151_936

Make = Callable[[], Callable[[], object]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One kernel at one size. `ours` and `eager` make a call on inputs of its own."""

    name: str
    size: str
    ours: Make
    eager: Make | None = None
    moved: int = 0
    """Bytes; 0: not judged by bandwidth."""
    flop: int = 0
    capturable: bool = True
    eager_capturable: bool = True


def cases(dtype: torch.dtype, device: torch.device, page_size: int) -> Iterator[Case]:
    """All of them, one after the other, so that only one holds memory."""
    for rows in (256, 4096, 16384):
        yield from _norms(rows, 4096, dtype, device)
    for rows in (256, 4096):
        yield _silu_mul(rows, 12288, dtype, device)
    for tokens in (256, 8192):
        yield _qk_rope_store(tokens, dtype, device, page_size)
    yield _embedding(8192, 4096, dtype, device)
    for rows in (1, 2, 4, 8, 16):
        for out_size, in_size in ((6144, 4096), (24576, 4096), (4096, 12288)):
            yield _linear(rows, out_size, in_size, dtype, device)
        yield _norm_gate_up(rows, 12288, 4096, dtype, device)


def _norms(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    def make(normalize: Callable[..., object]) -> Make:
        def inputs() -> Callable[[], object]:
            x, weight = normal(rows, width, dtype, device), normal(1, width, dtype, device)[0]
            return lambda: normalize(x, weight, _EPS)

        return inputs

    def make_sum(normalize: Callable[..., object]) -> Make:
        def inputs() -> Callable[[], object]:
            x, residual = (normal(rows, width, dtype, device) for _ in range(2))
            weight = normal(1, width, dtype, device)[0]
            return lambda: normalize(x, residual, weight, _EPS)

        return inputs

    size, matrix = f"{rows} x {width}", rows * width * dtype.itemsize
    yield Case(
        name="rms_norm", size=size, moved=2 * matrix, ours=make(rms_norm), eager=make(rms_norm_ref)
    )
    yield Case(
        name="add_rms_norm",
        size=size,
        moved=4 * matrix,
        ours=make_sum(add_rms_norm),
        eager=make_sum(add_rms_norm_ref),
    )


def _silu_mul(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Case:
    def eager(gate_up_TI: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up_TI.chunk(2, dim=-1)
        return functional.silu(gate) * up

    def make(gate: Callable[[torch.Tensor], object]) -> Make:
        def inputs() -> Callable[[], object]:
            x = normal(rows, 2 * width, dtype, device)
            return lambda: gate(x)

        return inputs

    return Case(
        name="silu_mul",
        size=f"{rows} x {width}",
        moved=3 * rows * width * dtype.itemsize,
        ours=make(silu_mul),
        eager=make(eager),
    )


def _qk_rope_store(tokens: int, dtype: torch.dtype, device: torch.device, page_size: int) -> Case:
    """Per-head norms, rotation of queries and keys, and the KV store of one layer."""
    columns = (_HEADS + 2 * _KV_HEADS) * _HEAD_DIM
    num_pages = -(-tokens // page_size)

    def make(place: Callable[..., object]) -> Make:
        def inputs() -> Callable[[], object]:
            qkv = normal(tokens, columns, dtype, device)
            positions = torch.arange(tokens, device=device)
            frequencies = 1e-4 ** torch.linspace(0, 1, _HEAD_DIM // 2, device=device)
            angles = rotary_angles_ref(positions, frequencies, 1.0, dtype)
            weight = normal(_HEADS + _KV_HEADS, _HEAD_DIM, dtype, device)
            pages = (num_pages, _KV_HEADS, page_size, _HEAD_DIM)
            k, v = (torch.zeros(pages, dtype=dtype, device=device).transpose(1, 2) for _ in "kv")
            return lambda: place(
                qkv, *angles, norm_weight=weight, eps=_EPS, k_pages=k, v_pages=v,
                slots=positions, num_heads=_HEADS,
            )  # fmt: skip

        return inputs

    return Case(
        name="qk_rope_store",
        size=f"{tokens} x {_HEADS}/{_KV_HEADS} x {_HEAD_DIM}",
        moved=2 * tokens * columns * dtype.itemsize,
        ours=make(qk_rope_store),
        eager=make(eager_qk_rope_store),
    )


def eager_qk_rope_store(
    qkv_TC: torch.Tensor,
    cos_T1D: torch.Tensor,
    signed_sin_T1D: torch.Tensor,
    *,
    norm_weight: torch.Tensor,
    eps: float,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    slots: torch.Tensor,
    num_heads: int,
) -> torch.Tensor:
    """Queries and keys one after the other, halves turned by concatenation; [T, H, D] queries."""
    num_kv_heads, head_dim = k_pages.shape[2:]
    half = head_dim // 2
    sin_TD = torch.cat((-signed_sin_T1D[..., :half], signed_sin_T1D[..., half:]), dim=-1)[:, 0]
    heads = qkv_TC.view(qkv_TC.shape[0], -1, head_dim)
    q, k, v = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)
    q = rms_norm_ref(q, None, eps) * norm_weight[:num_heads]
    k = rms_norm_ref(k, None, eps) * norm_weight[num_heads:]
    q, k = (rotate_ref(x, cos_T1D[:, 0], sin_TD) for x in (q, k))
    page, offset = slots // k_pages.shape[1], slots % k_pages.shape[1]
    k_pages.index_put_((page, offset), k)
    v_pages.index_put_((page, offset), v)
    return q


def _embedding(tokens: int, width: int, dtype: torch.dtype, device: torch.device) -> Case:
    def make(gather: Callable[..., object]) -> Make:
        def inputs() -> Callable[[], object]:
            weight = normal(VOCAB, width, dtype, device)
            ids = torch.randint(VOCAB, (tokens,), device=device)
            places = torch.randperm(tokens, device=device)
            return lambda: gather(ids, places, weight)

        return inputs

    return Case(
        name="gather_embeddings",
        size=f"{tokens} x {width}",
        moved=2 * tokens * width * dtype.itemsize,
        ours=make(gather_embeddings),
        eager=make(gather_embeddings_ref),
    )


def _linear(
    rows: int, out_size: int, in_size: int, dtype: torch.dtype, device: torch.device
) -> Case:
    def make(multiply: Callable[..., object]) -> Make:
        def inputs() -> Callable[[], object]:
            x = normal(rows, in_size, dtype, device)
            weight = normal(out_size, in_size, dtype, device)
            return lambda: multiply(x, weight)

        return inputs

    return Case(
        name="small_linear",
        size=f"{rows} rows, {in_size} to {out_size}",
        moved=(out_size * in_size + rows * (out_size + in_size)) * dtype.itemsize,
        ours=make(small_linear_triton),
        eager=make(functional.linear),
    )


def _norm_gate_up(
    rows: int, width: int, in_size: int, dtype: torch.dtype, device: torch.device
) -> Case:
    """The first half of a feed-forward layer: norm, both projections, gate."""

    def eager(x: torch.Tensor, weight: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
        y = functional.linear(rms_norm_ref(x, norm, _EPS), weight)
        gate, up = y.chunk(2, dim=-1)
        return functional.silu(gate) * up

    def ours(x: torch.Tensor, weight: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
        return small_linear_triton(x, weight, norm=(norm, _EPS), gated=True)

    def make(compute: Callable[..., object]) -> Make:
        def inputs() -> Callable[[], object]:
            x, norm = normal(rows, in_size, dtype, device), normal(1, in_size, dtype, device)[0]
            weight = normal(2 * width, in_size, dtype, device)
            return lambda: compute(x, weight, norm)

        return inputs

    return Case(
        name="small_linear+norm+gate",
        size=f"{rows} rows, {in_size} to 2 x {width}",
        moved=(2 * width * in_size + rows * (width + in_size)) * dtype.itemsize,
        ours=make(ours),
        eager=make(eager),
    )


def normal(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Random numbers."""
    return torch.randn(rows, columns, dtype=dtype, device=device)

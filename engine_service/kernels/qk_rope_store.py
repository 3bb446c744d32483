"""Per-head norms, rotation and the KV store of one layer in one launch. It knows no modules.

Shape legend: T tokens, H query heads, K key-value heads, D head size, N pages, G page size,
C = (H + 2 K) D.
"""

from __future__ import annotations

import torch

from engine_service.kernels.jit import jit, overlaps_launches, runs_triton, tl, triton
from engine_service.kernels.norm import rms_norm_ref
from engine_service.kernels.rotary import rotate
from engine_service.kernels.store_kv import store_kv


def qk_rope_store_ref(
    qkv_TC: torch.Tensor,
    cos_T1D: torch.Tensor,
    signed_sin_T1D: torch.Tensor,
    *,
    norm_weight: torch.Tensor | None,
    eps: float,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    slots: torch.Tensor,
    num_heads: int,
) -> torch.Tensor:
    """[T, H, D] rotated queries; rotated keys and values go to their slots.

    `qkv` [T, (H + 2 K) D]; `norm_weight` [H + K, D] or None; cos and sin as `rotary_angles` makes
    them, of all D features or of the leading ones that turn; pages are [N, G, K, D] of any strides;
    slot s is page s // G, offset s % G.
    """
    num_kv_heads, head_dim = k_pages.shape[2:]
    qkv = qkv_TC.view(qkv_TC.shape[0], -1, head_dim)
    qk, v = qkv[:, :-num_kv_heads], qkv[:, -num_kv_heads:]
    if norm_weight is not None:
        qk = rms_norm_ref(qk, None, eps) * norm_weight
    qk = rotate(qk, cos_T1D, signed_sin_T1D)
    page, offset = slots // k_pages.shape[1], slots % k_pages.shape[1]
    store_kv(k_pages, qk[:, num_heads:], page, offset)
    store_kv(v_pages, v, page, offset)
    return qk[:, :num_heads]


def qk_rope_store(
    qkv_TC: torch.Tensor,
    cos_T1D: torch.Tensor,
    signed_sin_T1D: torch.Tensor,
    *,
    norm_weight: torch.Tensor | None,
    eps: float,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    slots: torch.Tensor,
    num_heads: int,
) -> torch.Tensor:
    """`qk_rope_store_ref`; one launch on CUDA, which overwrites `qkv` and returns a view of it."""
    place = qk_rope_store_triton if runs_triton(qkv_TC) else qk_rope_store_ref
    return place(
        qkv_TC,
        cos_T1D,
        signed_sin_T1D,
        norm_weight=norm_weight,
        eps=eps,
        k_pages=k_pages,
        v_pages=v_pages,
        slots=slots,
        num_heads=num_heads,
    )


@jit
def _pairs(column: tl.tensor, HALF: tl.constexpr, TURNED: tl.constexpr) -> tl.tuple:
    """(feature, how far apart the other one is) of the HALF pairs of a head: TURNED pairs that turn
    together, and behind them those that stay, paired likewise."""
    feature, apart = column, HALF
    if TURNED < HALF:
        feature = column + tl.where(column < TURNED, 0, TURNED)
        apart = tl.where(column < TURNED, TURNED, HALF - TURNED)
    return feature, apart


@jit
def _load_angles(cos_ptrs: tl.tensor, sin_ptrs: tl.tensor, turned: tl.tensor) -> tl.tuple:
    """Of the half whose sine is not negated, for every head: threads then load what they multiply.
    What stays has the angle 0, and comes out bit for bit as it came in."""
    cos = tl.load(cos_ptrs, mask=turned, other=1.0)
    return cos, tl.load(sin_ptrs, mask=turned, other=0.0)


@jit
def _load_pairs(places: tl.tensor, apart: tl.tensor, inside: tl.tensor) -> tl.tuple:
    first = tl.load(places, mask=inside, other=0.0)
    return first, tl.load(places + apart, mask=inside, other=0.0)


@jit
def _store_pairs(
    places: tl.tensor, apart: tl.tensor, first: tl.tensor, second: tl.tensor, inside: tl.tensor
) -> None:
    tl.store(places, first, mask=inside)
    tl.store(places + apart, second, mask=inside)


@jit
def _scaled(x: tl.tensor, scale: tl.tensor, weight: tl.tensor) -> tl.tensor:
    """x * scale * weight with the roundings of `rms_norm_ref`."""
    normed = (x.to(tl.float32) * scale).to(x.dtype)
    return (normed.to(tl.float32) * weight.to(tl.float32)).to(x.dtype)


@jit
def _normed(
    first: tl.tensor,
    second: tl.tensor,
    weight_1: tl.tensor,
    weight_2: tl.tensor,
    eps: tl.tensor,
    WIDTH: tl.constexpr,
) -> tl.tuple:
    """`rms_norm_ref` of heads of `WIDTH` features that come as pairs."""
    wide_1, wide_2 = first.to(tl.float32), second.to(tl.float32)
    squares = tl.sum(wide_1 * wide_1 + wide_2 * wide_2, axis=1)
    scale = tl.rsqrt(squares / WIDTH + eps)[:, None]
    return _scaled(first, scale, weight_1), _scaled(second, scale, weight_2)


@jit
def _turned(first: tl.tensor, second: tl.tensor, cos: tl.tensor, sin: tl.tensor) -> tl.tuple:
    """Pairs rotated, in the format they came in and rounded once."""
    x, y = first.to(tl.float32), second.to(tl.float32)
    cos, sin = cos.to(tl.float32), sin.to(tl.float32)
    return (x * cos - y * sin).to(first.dtype), (y * cos + x * sin).to(first.dtype)


@jit
def _in_page(
    pages: tl.tensor,
    slot: tl.tensor,
    head: tl.tensor,
    page_stride: tl.tensor,
    slot_stride: tl.tensor,
    head_stride: tl.tensor,
    G: tl.constexpr,
) -> tl.tensor:
    """Where `slot` keeps the heads of one kind; those of another kind get a place never used."""
    start = (slot // G) * page_stride + (slot % G) * slot_stride
    return pages + start + head.to(tl.int64) * head_stride


@jit
def _qk_rope_store_kernel(
    qkv_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    slot_ptr: tl.tensor,
    eps: tl.tensor,
    row_stride: tl.tensor,
    k_stride_n: tl.tensor,
    k_stride_g: tl.tensor,
    k_stride_k: tl.tensor,
    v_stride_n: tl.tensor,
    v_stride_g: tl.tensor,
    v_stride_k: tl.tensor,
    H: tl.constexpr,
    K: tl.constexpr,
    G: tl.constexpr,
    HALF: tl.constexpr,
    TURNED: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
    column = tl.arange(0, BLOCK_HALF)[None, :]
    inside = column < HALF
    feature, apart = _pairs(column, HALF, TURNED)
    place = head * (2 * HALF) + feature
    if weight_ptr is not None:
        weight_1, weight_2 = _load_pairs(weight_ptr + place, apart, inside & (head < H + K))
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + token)
    qkv = qkv_ptr + token * row_stride + place
    v_1, v_2 = _load_pairs(qkv, apart, inside & (head < H + 2 * K))
    angle = tl.broadcast_to(token * (2 * TURNED) + TURNED + column, (BLOCK_HEADS, BLOCK_HALF))
    cos, sin = _load_angles(cos_ptr + angle, sin_ptr + angle, column < TURNED)
    x_1, x_2 = v_1, v_2
    if weight_ptr is not None:
        x_1, x_2 = _normed(v_1, v_2, weight_1, weight_2, eps, 2 * HALF)
    x_1, x_2 = _turned(x_1, x_2, cos, sin)
    _store_pairs(qkv, apart, x_1, x_2, inside & (head < H))
    keys = _in_page(k_ptr, slot, head - H, k_stride_n, k_stride_g, k_stride_k, G) + feature
    _store_pairs(keys, apart, x_1, x_2, inside & (head >= H) & (head < H + K))
    values = _in_page(v_ptr, slot, head - H - K, v_stride_n, v_stride_g, v_stride_k, G) + feature
    _store_pairs(values, apart, v_1, v_2, inside & (head >= H + K) & (head < H + 2 * K))


def qk_rope_store_triton(
    qkv_TC: torch.Tensor,
    cos_T1D: torch.Tensor,
    signed_sin_T1D: torch.Tensor,
    *,
    norm_weight: torch.Tensor | None,
    eps: float,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    slots: torch.Tensor,
    num_heads: int,
) -> torch.Tensor:
    """`qk_rope_store_ref` in one launch, which overwrites the queries in `qkv` and returns a view
    of them. Rows of `qkv` may lie apart; D is even and contiguous everywhere; float64 is not there.
    The weight must have been there before the kernels ahead were launched: it is read early.
    """
    num_tokens, (page_size, num_kv_heads, head_dim) = len(qkv_TC), k_pages.shape[1:]
    all_heads, block_half = num_heads + 2 * num_kv_heads, triton.next_power_of_2(head_dim // 2)
    # 8 elements of either half a thread: loads of 16 bytes in half formats.
    block_heads = min(triton.next_power_of_2(all_heads), max(1024 // block_half, 1))
    overlap = overlaps_launches(qkv_TC.device)
    _qk_rope_store_kernel[(num_tokens, triton.cdiv(all_heads, block_heads))](
        qkv_TC,
        cos_T1D,
        signed_sin_T1D,
        norm_weight,
        k_pages,
        v_pages,
        slots,
        eps,
        qkv_TC.stride(0),
        *k_pages.stride()[:3],
        *v_pages.stride()[:3],
        H=num_heads,
        K=num_kv_heads,
        G=page_size,
        HALF=head_dim // 2,
        TURNED=cos_T1D.shape[-1] // 2,
        BLOCK_HEADS=block_heads,
        BLOCK_HALF=block_half,
        PDL=overlap,
        num_warps=max(block_heads * block_half // 256, 1),
        # With fewer, which is what ptxas chooses by itself, some loads wait for others to end.
        maxnreg=64,
        launch_pdl=overlap,
    )
    return qkv_TC.view(num_tokens, -1, head_dim)[:, :num_heads]

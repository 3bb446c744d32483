"""Clears what a former owner left behind the last key of a span's last page, for attention that
loads pages whole: a score that is masked does not hide a NaN among the values. It does not know
who reads them.
"""

from __future__ import annotations

from functools import partial

import torch

from engine_service.kernels.jit import jit, runs_triton, tl, triton

_BLOCK = 1024
"""Values that a program writes at once."""


def clear_page_ends_ref(
    values_NGKD: torch.Tensor, page_table_SP: torch.Tensor, kv_lens_S: torch.Tensor
) -> None:
    """Slots [kv_len % G, G) of page `page_table[s, kv_len // G]` become zero, where the span's last
    page is not full.

    The table and the lengths are int32. A page that is not full belongs to one span.
    """
    page_size = values_NGKD.shape[1]
    for pages, length in zip(page_table_SP.tolist(), kv_lens_S.tolist(), strict=True):
        page, end = divmod(length, page_size)
        if end:
            values_NGKD[pages[page], end:] = 0


def clear_page_ends(
    values_NGKD: torch.Tensor, page_table_SP: torch.Tensor, kv_lens_S: torch.Tensor
) -> None:
    """`clear_page_ends_ref` for any memory order; one launch on CUDA, which checks nothing."""
    clear = clear_page_ends_triton if runs_triton(values_NGKD) else clear_page_ends_ref
    clear(values_NGKD, page_table_SP, kv_lens_S)


@partial(jit, do_not_specialize=["table_stride"])
def _clear_page_ends_kernel(
    value_ptr: tl.tensor,
    table_ptr: tl.tensor,
    kv_len_ptr: tl.tensor,
    page_stride: tl.tensor,
    slot_stride: tl.tensor,
    head_stride: tl.tensor,
    table_stride: tl.tensor,
    PAGE_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    span = tl.program_id(0).to(tl.int64)
    length = tl.load(kv_len_ptr + span)
    end = length % PAGE_SIZE
    if end > 0:
        page = tl.load(table_ptr + span * table_stride + length // PAGE_SIZE).to(tl.int64)
        for first in range(end * HEADS * HEAD_DIM, PAGE_SIZE * HEADS * HEAD_DIM, BLOCK):
            value = first + tl.arange(0, BLOCK)
            slot, head = value // (HEADS * HEAD_DIM), value // HEAD_DIM % HEADS
            at = page * page_stride + slot * slot_stride + head * head_stride + value % HEAD_DIM
            tl.store(value_ptr + at, 0.0, mask=slot < PAGE_SIZE)


def clear_page_ends_triton(
    values_NGKD: torch.Tensor, page_table_SP: torch.Tensor, kv_lens_S: torch.Tensor
) -> None:
    """`clear_page_ends_ref` in one launch, a program for every span; D lies densely."""
    _, page_size, heads, head_dim = values_NGKD.shape
    page_stride, slot_stride, head_stride, dim_stride = values_NGKD.stride()
    assert dim_stride == page_table_SP.stride(1) == 1, "values of a head lie side by side"
    _clear_page_ends_kernel[(len(kv_lens_S),)](
        values_NGKD,
        page_table_SP,
        kv_lens_S,
        page_stride,
        slot_stride,
        head_stride,
        page_table_SP.stride(0),
        PAGE_SIZE=page_size,
        HEADS=heads,
        HEAD_DIM=head_dim,
        BLOCK=min(triton.next_power_of_2(heads * head_dim), _BLOCK),
        num_warps=4,
    )

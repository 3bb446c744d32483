"""The page table of a step: lines of the device's table, which learns of late pages on the way. It
does not know which requests have got them.
"""

from __future__ import annotations

import torch

from engine_service.kernels.jit import jit, overlaps_launches, runs_triton, tl, triton

_MOST_ENTRIES = 1024
"""That a program moves at once."""


def page_lines_ref(
    table_RP: torch.Tensor,
    rows_S: torch.Tensor,
    late_S: torch.Tensor,
    pages_S: torch.Tensor,
    num_pages: int,
) -> torch.Tensor:
    """[S, num_pages]: table[rows, :num_pages], after table[rows, late] = pages where `late` is not
    below 0.

    The table, its late entries and their pages are int32, rows int64. A row that comes twice says
    the same twice. Nothing waits for the device.
    """
    at, is_late = late_S.clamp(min=0).long(), late_S >= 0
    known = table_RP[rows_S, at]
    table_RP.index_put_((rows_S, at), torch.where(is_late, pages_S, known))
    return table_RP[:, :num_pages].index_select(0, rows_S)


def page_lines(
    table_RP: torch.Tensor,
    rows_S: torch.Tensor,
    late_S: torch.Tensor,
    pages_S: torch.Tensor,
    num_pages: int,
) -> torch.Tensor:
    """`page_lines_ref`; one launch on CUDA, where rows and entries are not checked."""
    lines = page_lines_triton if runs_triton(table_RP) else page_lines_ref
    return lines(table_RP, rows_S, late_S, pages_S, num_pages)


@jit
def _page_lines_kernel(
    table_ptr: tl.tensor,
    row_ptr: tl.tensor,
    late_ptr: tl.tensor,
    page_ptr: tl.tensor,
    out_ptr: tl.tensor,
    table_stride: tl.tensor,
    num_pages: tl.tensor,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    span = tl.program_id(0).to(tl.int64)
    late = tl.load(late_ptr + span)
    page = tl.load(page_ptr + span)
    line = table_ptr + tl.load(row_ptr + span) * table_stride
    for first in range(0, num_pages, BLOCK):
        entry = first + tl.arange(0, BLOCK)
        known = tl.load(line + entry, mask=entry < num_pages)
        # Its own store may not have reached the table yet.
        now = tl.where(entry == late, page, known)
        tl.store(out_ptr + span * num_pages + entry, now, mask=entry < num_pages)
    tl.store(line + late, page, mask=late >= 0)


def page_lines_triton(
    table_RP: torch.Tensor,
    rows_S: torch.Tensor,
    late_S: torch.Tensor,
    pages_S: torch.Tensor,
    num_pages: int,
) -> torch.Tensor:
    """`page_lines_ref` in one launch, a program for every line."""
    num_spans = len(rows_S)
    out = table_RP.new_empty(num_spans, num_pages)
    overlap = overlaps_launches(table_RP.device)
    _page_lines_kernel[(num_spans,)](
        table_RP,
        rows_S.contiguous(),
        late_S.contiguous(),
        pages_S.contiguous(),
        out,
        table_RP.stride(0),
        num_pages,
        BLOCK=min(triton.next_power_of_2(num_pages), _MOST_ENTRIES),
        PDL=overlap,
        num_warps=1,
        launch_pdl=overlap,
    )
    return out

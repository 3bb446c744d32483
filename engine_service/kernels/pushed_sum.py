"""Adds what this device has computed to the residual stream, and what another one has copied here,
and makes the norm that is read of it.

`peer_sum` reads the other's memory itself, and the matrix units are idle meanwhile. Parts of many
rows are copied beside products instead, by engines that take no multiprocessor; this kernel waits
until the peer has told that its copy is complete. It does not know streams, models, nor how memory
comes to be shared. Shape legend: T rows, E hidden size.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch

from engine_service.kernels.jit import jit, overlaps_launches, tl, triton
from engine_service.kernels.peer_sum import add_row, row_warps

RELEASED = -1
"""Told instead of a number: nobody waits any more, and what is added means nothing."""
_MAX_PROGRAMS = 512


class Pushed(NamedTuple):
    """Two parts of a sum: `peer_sum.add_parts_ref` says what becomes of them."""

    own_TE: torch.Tensor
    theirs_TE: torch.Tensor
    """Complete when `number` is told."""
    told: torch.Tensor
    """[1] int32."""
    number: int
    """At least 0, and not what was told before."""


@partial(jit, do_not_specialize=["number", "num_rows"])
def _add_pushed_kernel(
    residual_ptr: tl.tensor,
    parts: tl.tensor,
    told_ptr: tl.tensor,
    number: tl.tensor,
    weight_ptr: tl.tensor,
    normed_ptr: tl.tensor,
    eps: tl.tensor,
    num_rows: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    column = tl.arange(0, BLOCK)
    weight = None
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + column, mask=column < WIDTH, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    told = tl.atomic_add(told_ptr, 0, sem="acquire", scope="sys")
    while (told != number) & (told >= 0):
        told = tl.atomic_add(told_ptr, 0, sem="acquire", scope="sys")
    tl.debug_barrier()
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        add_row(residual_ptr, parts, normed_ptr, row, column, weight, eps, 2, WIDTH)


def add_pushed_triton(
    residual_TE: torch.Tensor,
    pushed: Pushed,
    norm: tuple[torch.Tensor, float] | None = None,
    normed_TE: torch.Tensor | None = None,
) -> None:
    """`add_parts_ref` of both parts once the peer's is complete; the norm is written into `normed`.

    The norm's weight must have been there before the kernels ahead were launched: it is read early.
    """
    assert residual_TE.is_contiguous()
    assert (norm is None) == (normed_TE is None)
    num_rows, width = residual_TE.shape
    weight, eps = norm or (None, 0.0)
    block = triton.next_power_of_2(width)
    overlap = overlaps_launches(residual_TE.device)
    _add_pushed_kernel[(min(_MAX_PROGRAMS, num_rows),)](
        residual_TE,
        (pushed.own_TE, pushed.theirs_TE),
        pushed.told,
        pushed.number,
        weight,
        normed_TE,
        eps,
        num_rows,
        WIDTH=width,
        BLOCK=block,
        PDL=overlap,
        num_warps=row_warps(block),
        launch_pdl=overlap,
    )

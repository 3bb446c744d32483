"""Adds what several devices have computed to the residual stream, and makes the norm that is read
of it; each device adds a share of the rows in rounds, and writes it to the others.

`peer_sum` reads every part whole: R - 1 times the bytes of one, where this reads and writes
2 (R - 1) / R times as many (the two-shot all-reduce of TensorRT-LLM and vLLM, over peer pointers;
no multicast). While a round's rows are on their way to the other ranks, a program takes what these
have added in the round before. That costs a signal a round, so it is for rows too many to be sent
into boxes (`mailed_sum`). It does not know models, nor how memory comes to be shared.
Shape legend: T rows, E hidden size, R ranks.
"""

from __future__ import annotations

from functools import partial

import torch

from engine_service.kernels.jit import jit, tl
from engine_service.kernels.peer_sum import (
    MAX_BLOCKS,
    REGISTERS,
    Parts,
    add_row,
    keep_row,
    launch_sum,
    lines_of,
    next_turn,
    num_sms,
    tell,
    wait,
    wait_for_inputs,
)

_ROUND = 2
"""Rows of a program that it tells together."""


@jit
def _give_row(
    x: tl.tensor,
    parts: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    RANK: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Every other rank's part := the sum."""
    for other in tl.static_range(NUM_RANKS):
        if other != RANK:
            tl.store(parts[other] + row * WIDTH + column, x, mask=column < WIDTH)


@jit
def _take_row(
    residual_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    normed_ptr: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    weight: tl.tensor,
    eps: tl.tensor,
    WIDTH: tl.constexpr,
) -> None:
    """residual := the sum that its owner has written; `weight` of the norm, or None."""
    place, inside = row * WIDTH + column, column < WIDTH
    x = tl.load(sums_ptr + place, mask=inside, other=0.0)
    keep_row(x, residual_ptr, normed_ptr, place, inside, weight, eps, WIDTH)


@jit
def _add_rows(
    residual_ptr: tl.tensor,
    parts: tl.tensor,
    normed_ptr: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
    weight: tl.tensor,
    eps: tl.tensor,
    RANK: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """This program's rows of the rank's share; the sums take the places of the parts: nobody else
    reads these, on any rank."""
    column = tl.arange(0, BLOCK)
    for row in range(first + tl.program_id(0), last, tl.num_programs(0)):
        x = add_row(residual_ptr, parts, normed_ptr, row, column, weight, eps, NUM_RANKS, WIDTH)
        _give_row(x, parts, row, column, RANK, NUM_RANKS, WIDTH)


@jit
def _take_rows(
    residual_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    normed_ptr: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
    weight: tl.tensor,
    eps: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """This program's rows of another rank's share."""
    column = tl.arange(0, BLOCK)
    for row in range(first + tl.program_id(0), last, tl.num_programs(0)):
        _take_row(residual_ptr, sums_ptr, normed_ptr, row, column, weight, eps, WIDTH)


@partial(jit, do_not_specialize=["num_rows", "share", "stride"])
def _rounds_sum_kernel(
    x_ptr: tl.tensor,
    parts: tl.tensor,
    signals_ptr: tl.tensor,
    lines_ptr: tl.tensor,
    count_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    normed_ptr: tl.tensor,
    eps: tl.tensor,
    num_rows: tl.tensor,
    share: tl.tensor,
    stride: tl.tensor,
    WIDTH: tl.constexpr,
    RANK: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    LANES: tl.constexpr,
    MAX: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    block, weight = tl.program_id(0), None
    if weight_ptr is not None:
        column = tl.arange(0, BLOCK)
        weight = tl.load(weight_ptr + column, mask=column < WIDTH, other=0.0)
    peer = tl.arange(0, LANES)
    there = (peer < NUM_RANKS) & (peer != RANK)
    lines, told = lines_of(lines_ptr, peer, there), signals_ptr + peer * MAX + block
    wait_for_inputs(PDL)
    # One for the parts, and one a round.
    turn = next_turn(count_ptr + block, (share + stride - 1) // stride)
    tell(lines, there, RANK * MAX + block, turn)
    wait(told, there, turn)
    for start in range(0, share + stride, stride):
        if start < share:
            first = RANK * share + start
            last = min(min(first + stride, (RANK + 1) * share), num_rows)
            _add_rows(
                x_ptr, parts, normed_ptr, first, last, weight, eps, RANK, NUM_RANKS, WIDTH, BLOCK
            )
            tell(lines, there, RANK * MAX + block, turn + 1)
        if start > 0:
            wait(told, there, turn)
            for other in tl.static_range(NUM_RANKS):
                if other != RANK:
                    first = other * share + start - stride
                    last = min(min(first + stride, (other + 1) * share), num_rows)
                    _take_rows(
                        x_ptr, parts[RANK], normed_ptr, first, last, weight, eps, WIDTH, BLOCK
                    )
        turn += 1


def add_parts_rounds_triton(
    residual_TE: torch.Tensor,
    shared: Parts,
    rank: int,
    norm: tuple[torch.Tensor, float] | None = None,
    *,
    normed_TE: torch.Tensor | None = None,
    most_sms: int | None = None,
) -> torch.Tensor | None:
    """`peer_sum.add_parts_ref` where all ranks launch it with parts of the same shape and equal
    residuals; bit for bit as `peer_sum.add_parts_triton`, with which it shares what is counted.

    Parts are overwritten; one may be written again once any later sum of other parts has been
    launched behind this one. `normed` takes the norm, if it is given; its weight must have been
    there before the kernels ahead were launched: it is read early. `most_sms` is how many
    multiprocessors the programs fill (None: all), the same on all ranks.
    """
    share = -(-len(residual_TE) // len(shared.parts))
    sms = most_sms or num_sms(residual_TE.device)
    programs = min(share, MAX_BLOCKS, 2 * sms)
    return launch_sum(
        _rounds_sum_kernel,
        programs,
        residual_TE,
        shared,
        rank,
        norm,
        share,
        _ROUND * programs,
        normed_TE=normed_TE,
        maxnreg=REGISTERS if programs > sms else None,
    )

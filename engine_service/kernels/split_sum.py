"""Adds what several devices have computed to the residual stream, and makes the norm that is read
of it; each device adds a share of the rows and writes it to the others.

`peer_sum` reads every part whole: R - 1 times the bytes of one, where this reads and writes
2 (R - 1) / R times as many, with a second signal in between (the two-shot all-reduce of
TensorRT-LLM and vLLM, over peer pointers; no multicast). So it pays with three ranks or more, where
bytes count for more than a signal does. It does not know models, nor how memory comes to be shared.
Shape legend: T rows, E hidden size, R ranks.
"""

from __future__ import annotations

from functools import cache, partial

import torch

from engine_service.kernels.jit import jit, tl
from engine_service.kernels.norm import normed_row
from engine_service.kernels.peer_sum import (
    MAX_BLOCKS,
    Parts,
    add_row,
    launch_sum,
    lines_of,
    next_turn,
    tell,
    wait,
    wait_for_inputs,
)

REGISTERS = 64
"""Of a thread at most where a multiprocessor must hold two programs at once; they are faster with
as many as they like."""


@cache
def num_sms(device: torch.device) -> int:
    """Multiprocessors that it has."""
    if device.type != "cuda":
        return MAX_BLOCKS
    return torch.cuda.get_device_properties(device).multi_processor_count


@jit
def give_row(
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
def take_row(
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
    tl.store(residual_ptr + place, x, mask=inside)
    if weight is not None:
        tl.store(normed_ptr + place, normed_row(x, weight, eps, WIDTH), mask=inside)


@partial(jit, do_not_specialize=["num_rows", "share", "programs"])
def _split_sum_kernel(
    residual_ptr: tl.tensor,
    parts: tl.tensor,
    signals_ptr: tl.tensor,
    lines_ptr: tl.tensor,
    count_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    normed_ptr: tl.tensor,
    eps: tl.tensor,
    num_rows: tl.tensor,
    share: tl.tensor,
    programs: tl.tensor,
    WIDTH: tl.constexpr,
    RANK: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    LANES: tl.constexpr,
    MAX: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    block = tl.program_id(0)
    owner = block // programs
    first, last = owner * share + block % programs, min(owner * share + share, num_rows)
    column = tl.arange(0, BLOCK)
    weight = None
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + column, mask=column < WIDTH, other=0.0)
    # The owner waits for all others, and they for it. All are told: by days of steps of one size,
    # what another size waits for would lie so far back that it looks ahead.
    peer = tl.arange(0, LANES)
    there = (peer < NUM_RANKS) & (peer != RANK)
    awaited = there & ((owner == RANK) | (peer == owner))
    lines = lines_of(lines_ptr, peer, there)
    told = signals_ptr + peer * MAX + block
    wait_for_inputs(PDL)
    turn = next_turn(count_ptr + block)
    if owner == RANK:
        wait(told, awaited, turn)
        # Nobody else reads these rows, on any rank: their sum may take the place of the parts.
        for row in range(first, last, programs):
            x = add_row(residual_ptr, parts, normed_ptr, row, column, weight, eps, NUM_RANKS, WIDTH)
            give_row(x, parts, row, column, RANK, NUM_RANKS, WIDTH)
        tell(lines, there, RANK * MAX + block, turn)
    else:
        tell(lines, there, RANK * MAX + block, turn)
        wait(told, awaited, turn)
        for row in range(first, last, programs):
            take_row(residual_ptr, parts[RANK], normed_ptr, row, column, weight, eps, WIDTH)


def add_parts_split_triton(
    residual_TE: torch.Tensor,
    shared: Parts,
    rank: int,
    norm: tuple[torch.Tensor, float] | None = None,
) -> torch.Tensor | None:
    """`peer_sum.add_parts_ref` where all ranks launch it with parts of the same shape and equal
    residuals; bit for bit as `peer_sum.add_parts_triton`, with which it shares what is counted.

    Parts are overwritten; one may be written again once any later sum of other parts has been
    launched behind this one. The norm's weight must have been there before the kernels ahead were
    launched: it is read early.
    """
    num_ranks = len(shared.parts)
    share = -(-len(residual_TE) // num_ranks)
    # For the share of each rank. The same program has the same rows on all ranks: on one it adds
    # them, on the others it waits for them.
    sms = num_sms(residual_TE.device)
    programs = min(share, min(MAX_BLOCKS, 2 * sms) // num_ranks)
    return launch_sum(
        _split_sum_kernel,
        num_ranks * programs,
        residual_TE,
        shared,
        rank,
        norm,
        share,
        programs,
        maxnreg=REGISTERS if num_ranks * programs > sms else None,
    )

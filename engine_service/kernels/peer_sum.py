"""Adds what several devices have computed to the residual stream, and makes the norm that is read
of it; each reads the others' memory.

One launch instead of an all-reduce, a sum and a norm: every device signals that its part is there,
waits for the others' signals and adds all parts in the order of ranks, so that all get the same
bits (the one-shot all-reduce of TensorRT-LLM and vLLM, over peer pointers; no multicast). It does
not know models, nor how memory comes to be shared. Shape legend: T rows, E hidden size, R ranks.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any, NamedTuple

import torch

from engine_service.kernels.jit import jit, overlaps_launches, tl, triton
from engine_service.kernels.norm import normed_row, rms_norm_ref

MAX_BLOCKS = 256
"""Programs that can tell each other: all of a launch must run at once, or one could wait for a
peer's that cannot start."""
_PROGRAMS = 128
"""Of a launch here."""
REGISTERS = 64
"""Of a thread at most where a multiprocessor must hold two programs at once; they are faster with
as many as they like."""
_FAR = 1 << 30
"""Turns ahead, by which nobody waits any more."""


class Parts(NamedTuple):
    """The same place on every rank, in the order of ranks."""

    parts: tuple[torch.Tensor, ...]
    """R times [T, E], contiguous: what each rank adds."""
    signals: tuple[torch.Tensor, ...]
    """R times [R, MAX_BLOCKS] int32, zero at first: line p of a rank's is what rank p has told."""
    lines: torch.Tensor
    """[R] int64 of this rank: where each one's signals begin."""
    turns: torch.Tensor
    """[MAX_BLOCKS] int32 of this rank, zero at first: turns so far, one or more a launch."""


def add_parts_ref(
    residual_TE: torch.Tensor,
    parts: tuple[torch.Tensor, ...],
    norm: tuple[torch.Tensor, float] | None = None,
) -> torch.Tensor | None:
    """residual := residual + the sum of all parts, which is made in float32 in their order. Returns
    the RMSNorm (weight, eps) of that if one is given."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    residual_TE.copy_(residual_TE.float() + total)
    return None if norm is None else rms_norm_ref(residual_TE, *norm)


@jit
def keep_row(
    x: tl.tensor,
    residual_ptr: tl.tensor,
    normed_ptr: tl.tensor,
    place: tl.tensor,
    inside: tl.tensor,
    weight: tl.tensor,
    eps: tl.tensor,
    WIDTH: tl.constexpr,
) -> None:
    """residual := x, and the norm of that; `weight` of the norm, or None."""
    tl.store(residual_ptr + place, x, mask=inside)
    if weight is not None:
        tl.store(normed_ptr + place, normed_row(x, weight, eps, WIDTH), mask=inside)


@jit
def add_row(
    residual_ptr: tl.tensor,
    parts: tl.tensor,
    normed_ptr: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    weight: tl.tensor,
    eps: tl.tensor,
    NUM_PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> tl.tensor:
    """`add_parts_ref` of one row, which it returns; `weight` of the norm, or None."""
    place, inside = row * WIDTH + column, column < WIDTH
    total = tl.load(parts[0] + place, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(1, NUM_PARTS):
        total += tl.load(parts[part] + place, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(residual_ptr + place, mask=inside, other=0.0)
    x = (x.to(tl.float32) + total).to(x.dtype)
    keep_row(x, residual_ptr, normed_ptr, place, inside, weight, eps, WIDTH)
    return x


@jit
def next_turn(count_ptr: tl.tensor, more: tl.tensor = 0) -> tl.tensor:
    """Turns are counted on the device: a captured graph tells another number at every replay. The
    launch takes so many more behind this one."""
    turn = tl.load(count_ptr) + 1
    tl.debug_barrier()
    tl.store(count_ptr, turn + more)
    return turn


@jit
def wait_for_inputs(PDL: tl.constexpr) -> None:
    """What was launched behind may begin to wait, too."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@jit
def lines_of(lines_ptr: tl.tensor, peer: tl.tensor, there: tl.tensor) -> tl.tensor:
    """Where these ranks' signals begin: side by side, because one after the other, tells and waits
    would take a trip over the link each."""
    lines = tl.load(lines_ptr + peer, mask=there, other=0)
    return lines.to(tl.pointer_type(tl.int32))


@jit
def tell(lines: tl.tensor, there: tl.tensor, place: tl.tensor, turn: tl.tensor) -> None:
    """What this block wrote before can be read by whoever has waited for it."""
    tl.debug_barrier()
    tl.atomic_xchg(lines + place, turn, mask=there, sem="release", scope="sys")


@jit
def wait(told: tl.tensor, there: tl.tensor, turn: tl.tensor) -> None:
    """Returns when all have told this turn."""
    # By difference: counts begin anew below zero after some days of steps. What goes around is no
    # tensor: Triton 3.6 does not compile such loops.
    last = turn - 1
    while last - turn < 0:
        behind = tl.atomic_add(told, 0, mask=there, sem="acquire", scope="sys") - turn
        last = turn + tl.min(tl.where(there, behind, 0))
    tl.debug_barrier()


@cache
def num_sms(device: torch.device) -> int:
    """Multiprocessors that it has."""
    if device.type != "cuda":
        return MAX_BLOCKS
    return torch.cuda.get_device_properties(device).multi_processor_count


def row_warps(block: int) -> int:
    """Of a program that holds rows of `block` elements: a load of 16 bytes a thread, or two."""
    return min(max(block // 256, 1), 16)


@partial(jit, do_not_specialize=["num_rows"])
def _add_parts_kernel(
    residual_ptr: tl.tensor,
    parts: tl.tensor,
    signals_ptr: tl.tensor,
    lines_ptr: tl.tensor,
    count_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    normed_ptr: tl.tensor,
    eps: tl.tensor,
    num_rows: tl.tensor,
    WIDTH: tl.constexpr,
    RANK: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    LANES: tl.constexpr,
    MAX: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    block = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    weight = None
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + column, mask=column < WIDTH, other=0.0)
    peer = tl.arange(0, LANES)
    there = (peer < NUM_RANKS) & (peer != RANK)
    lines = lines_of(lines_ptr, peer, there)
    wait_for_inputs(PDL)
    turn = next_turn(count_ptr + block)
    tell(lines, there, RANK * MAX + block, turn)
    wait(signals_ptr + peer * MAX + block, there, turn)
    for row in range(block, num_rows, tl.num_programs(0)):
        add_row(residual_ptr, parts, normed_ptr, row, column, weight, eps, NUM_RANKS, WIDTH)


def release(shared: Parts, rank: int) -> None:
    """This rank waits for nobody any more, in a launch that waits already too; what it adds means
    nothing then. On the current stream, which must be none of the launches'; it waits for that
    alone, and launches no kernel, because loading one may wait for those that run."""
    told_M = shared.turns.cpu() + _FAR
    shared.signals[rank].copy_(told_M.expand(len(shared.parts), -1).contiguous())


def add_parts_triton(
    residual_TE: torch.Tensor,
    shared: Parts,
    rank: int,
    norm: tuple[torch.Tensor, float] | None = None,
) -> torch.Tensor | None:
    """`add_parts_ref` where all ranks launch it with parts of the same shape.

    A part may be written again once any later sum of other parts has been launched behind this one.
    The norm's weight must have been there before the kernels ahead were launched: it is read early.
    """
    programs = min(_PROGRAMS, len(residual_TE))
    return launch_sum(_add_parts_kernel, programs, residual_TE, shared, rank, norm)


def launch_sum(
    kernel: Any,
    programs: int,
    residual_TE: torch.Tensor,
    shared: Parts,
    rank: int,
    norm: tuple[torch.Tensor, float] | None,
    *sizes: int,
    normed_TE: torch.Tensor | None = None,
    maxnreg: int | None = None,
) -> torch.Tensor | None:
    """A kernel that adds whole rows of all parts. `sizes`: what it takes behind the number of rows;
    `normed` takes the norm, if it is given. Returned is the norm, if there is one."""
    assert residual_TE.is_contiguous()
    num_rows, width = residual_TE.shape
    block = triton.next_power_of_2(width)
    weight, eps = norm or (None, 0.0)
    if weight is not None and normed_TE is None:
        normed_TE = torch.empty_like(residual_TE)
    overlap = overlaps_launches(residual_TE.device)
    kernel[(programs,)](
        residual_TE,
        shared.parts,
        shared.signals[rank],
        shared.lines,
        shared.turns,
        weight,
        normed_TE,
        eps,
        num_rows,
        *sizes,
        WIDTH=width,
        RANK=rank,
        NUM_RANKS=len(shared.parts),
        LANES=triton.next_power_of_2(len(shared.parts)),
        MAX=MAX_BLOCKS,
        BLOCK=block,
        PDL=overlap,
        num_warps=row_warps(block),
        maxnreg=maxnreg,
        launch_pdl=overlap,
    )
    return normed_TE

"""Adds what several devices have computed to the residual stream, and makes the norm that is read
of it; each device writes into the others' memory, and waits for the numbers themselves.

`peer_sum` tells that a part is there, waits until all have told, and fetches theirs: a fence and
two trips over the link. Here a part is sent into boxes that hold `EMPTY`, which is no result, until
it comes; whoever takes it out writes `EMPTY` again. So there is no signal, no fence and one trip
(what TensorRT-LLM and FlashInfer call the Lamport all-reduce, one-shot and two-shot; over peer
pointers, no multicast). It does not know models, nor how memory comes to be shared.
Shape legend: T rows, E hidden size, R ranks.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch

from engine_service.kernels.jit import jit, overlaps_launches, tl, triton
from engine_service.kernels.peer_sum import (
    REGISTERS,
    keep_row,
    num_sms,
    row_warps,
    wait_for_inputs,
)

EMPTY = -1
"""As an integer of a number's size: all bits set, which is no number in any floating-point format.
Where a part holds it all the same, another one that is no number is sent."""
_PIECE = 1024
"""Elements of a row that a program adds where rows need not be whole."""
_LEAST_PAIRED = 256
"""Elements of a program from which on a thread holds eight that lie side by side."""
_WARPS = 32
"""Of `REGISTERS` each that a multiprocessor holds. All programs of a launch run at once, or one
could wait for a peer's that cannot start; half as many may have as many registers as they like."""
_WORDS = {2: torch.int16, 4: torch.int32}


class Mail(NamedTuple):
    """Where ranks write to each other at one site, in the order of ranks. Sums that follow each
    other have different sites: who has the next sum whole knows that all have taken out this one.
    """

    boxes: tuple[torch.Tensor, ...]
    """R times [R, T, E] integers, `EMPTY` at first: line p of a rank's is what rank p sends it."""
    released: torch.Tensor
    """[1] int32 of this rank: unless zero, it waits for nobody."""


def words_of(dtype: torch.dtype) -> torch.dtype:
    """What boxes for numbers of a format hold."""
    return _WORDS[dtype.itemsize]


@jit
def _tells(column: tl.tensor, inside: tl.tensor, PAIRED: tl.constexpr) -> tl.tensor:
    """Which elements show whether they have come: of each pair of 16 bits the first, since 32 bits
    come at once. Looking is most of what a program does while it waits."""
    return inside & (column % 2 == 0) if PAIRED else inside


@jit
def _sent(word: tl.tensor, tells: tl.tensor) -> tl.tensor:
    """The same, but nothing that looks as if it had not come: another one that is no number."""
    largest: tl.constexpr = 0x7FFF if word.dtype.primitive_bitwidth == 16 else 0x7FFFFFFF
    return tl.where((word == -1) & tells, tl.full(word.shape, largest, word.dtype), word)


@jit
def _send(
    word: tl.tensor,
    boxes: tl.tuple,
    place: tl.tensor,
    inside: tl.tensor,
    to: tl.tensor,
    RANK: tl.constexpr,
    NUM_RANKS: tl.constexpr,
) -> None:
    """To one rank, or to all others (None)."""
    for other in tl.static_range(NUM_RANKS):
        if other != RANK:
            there = inside if to is None else inside & (to == other)
            tl.store(boxes[other] + place, word, mask=there)


@jit
def _look(
    box_ptr: tl.tensor,
    line: tl.tensor,
    inside: tl.tensor,
    RANK: tl.constexpr,
    NUM_RANKS: tl.constexpr,
) -> tl.tuple:
    """What lies there now of every other rank; all are asked for before one is waited for."""
    words: tl.tuple = ()
    for part in tl.static_range(NUM_RANKS):
        if part != RANK:
            word = tl.load(box_ptr + part * line, mask=inside, other=0, volatile=True)
            words = words + (word,)  # noqa: RUF005 - Triton knows no star
    return words


@jit
def _is_missing(words: tl.tuple, tells: tl.tensor, released_ptr: tl.tensor) -> tl.tensor:
    """1 if one of them has not come and is waited for, else 0: the same for all threads, which may
    see a release at different times."""
    empty = words[0] == -1
    for index in tl.static_range(1, len(words)):
        empty = empty | (words[index] == -1)
    waits = tl.load(released_ptr, volatile=True) == 0
    return tl.max((empty & tells & waits).to(tl.int32))


@jit
def _clear(box_ptr: tl.tensor, word: tl.tensor, inside: tl.tensor) -> None:
    tl.store(box_ptr, tl.full(word.shape, -1, word.dtype), mask=inside)


@jit
def _number(word: tl.tensor, like: tl.tensor) -> tl.tensor:
    return word.to(like.dtype, bitcast=True).to(tl.float32)


@jit
def _sum_of_row(
    residual_ptr: tl.tensor,
    own: tl.tensor,
    box_ptr: tl.tensor,
    released_ptr: tl.tensor,
    line: tl.tensor,
    inside: tl.tensor,
    tells: tl.tensor,
    RANK: tl.constexpr,
    NUM_RANKS: tl.constexpr,
) -> tl.tensor:
    """`peer_sum.add_parts_ref` of a row: own part and what the others send, which is taken out."""
    residual = tl.load(residual_ptr, mask=inside, other=0.0)
    words = _look(box_ptr, line, inside, RANK, NUM_RANKS)
    while _is_missing(words, tells, released_ptr) != 0:
        words = _look(box_ptr, line, inside, RANK, NUM_RANKS)
    for part in tl.static_range(NUM_RANKS):
        if part != RANK:
            _clear(box_ptr + part * line, own, inside)
    total = _number(own if RANK == 0 else words[0], residual)
    for part in tl.static_range(1, NUM_RANKS):
        total += _number(own if part == RANK else words[part - (part > RANK)], residual)
    return (residual.to(tl.float32) + total).to(residual.dtype)


@jit
def _sum_from_owner(
    box_ptr: tl.tensor, released_ptr: tl.tensor, inside: tl.tensor, tells: tl.tensor
) -> tl.tensor:
    """What the owner of a row sends, which is taken out."""
    word = tl.load(box_ptr, mask=inside, other=0, volatile=True)
    while _is_missing((word,), tells, released_ptr) != 0:
        word = tl.load(box_ptr, mask=inside, other=0, volatile=True)
    _clear(box_ptr, word, inside)
    return word


@partial(jit, do_not_specialize=["num_rows"])
def _mailed_sum_kernel(
    residual_ptr: tl.tensor,
    part_ptr: tl.tensor,
    boxes: tl.tuple,
    released_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    normed_ptr: tl.tensor,
    eps: tl.tensor,
    line: tl.tensor,
    num_rows: tl.tensor,
    WIDTH: tl.constexpr,
    RANK: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
    PAIRED: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, weight = column < WIDTH, None
    tells = _tells(column, inside, PAIRED)
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
    wait_for_inputs(PDL)
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        place = row * WIDTH + column
        own = _sent(tl.load(part_ptr + place, mask=inside, other=0), tells)
        _send(own, boxes, RANK * line + place, inside, None, RANK, NUM_RANKS)
        row_ptr, box_ptr = residual_ptr + place, boxes[RANK] + place
        x = _sum_of_row(row_ptr, own, box_ptr, released_ptr, line, inside, tells, RANK, NUM_RANKS)
        keep_row(x, residual_ptr, normed_ptr, place, inside, weight, eps, WIDTH)


@partial(jit, do_not_specialize=["num_rows", "share", "programs"])
def _mailed_shares_kernel(
    residual_ptr: tl.tensor,
    part_ptr: tl.tensor,
    boxes: tl.tuple,
    released_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    normed_ptr: tl.tensor,
    eps: tl.tensor,
    line: tl.tensor,
    num_rows: tl.tensor,
    share: tl.tensor,
    programs: tl.tensor,
    WIDTH: tl.constexpr,
    RANK: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
    PAIRED: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    owner = tl.program_id(0) // programs
    first = owner * share + tl.program_id(0) % programs
    last = min(owner * share + share, num_rows)
    column = tl.arange(0, BLOCK)
    inside, weight = column < WIDTH, None
    tells = _tells(column, inside, PAIRED)
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
    wait_for_inputs(PDL)
    # All of them leave before the first one is waited for.
    if owner != RANK:
        for row in range(first, last, programs):
            place = row * WIDTH + column
            own = _sent(tl.load(part_ptr + place, mask=inside, other=0), tells)
            _send(own, boxes, RANK * line + place, inside, owner, RANK, NUM_RANKS)
    for row in range(first, last, programs):
        place = row * WIDTH + column
        row_ptr, box_ptr = residual_ptr + place, boxes[RANK] + place
        if owner == RANK:
            own = tl.load(part_ptr + place, mask=inside, other=0)
            x = _sum_of_row(
                row_ptr, own, box_ptr, released_ptr, line, inside, tells, RANK, NUM_RANKS
            )
            word = _sent(x.to(own.dtype, bitcast=True), tells)
            _send(word, boxes, RANK * line + place, inside, None, RANK, NUM_RANKS)
        else:
            word = _sum_from_owner(box_ptr + owner * line, released_ptr, inside, tells)
        x = word.to(residual_ptr.dtype.element_ty, bitcast=True)
        keep_row(x, residual_ptr, normed_ptr, place, inside, weight, eps, WIDTH)


def release(mail: Mail) -> None:
    """This rank waits for nobody any more, in a launch that waits already too; what it adds means
    nothing then. On the current stream, which must be none of the launches'; it waits for that
    alone, and launches no kernel, because loading one may wait for those that run."""
    mail.released.copy_(torch.ones(1, dtype=torch.int32))


def add_mailed_triton(
    residual_TE: torch.Tensor,
    part_TE: torch.Tensor,
    mail: Mail,
    rank: int,
    norm: tuple[torch.Tensor, float] | None = None,
) -> torch.Tensor | None:
    """`peer_sum.add_parts_ref` where all ranks launch it with parts of the same shape, each of
    which is sent to all others whole; numbers have the same bits as `peer_sum.add_parts_triton`'s.

    The norm's weight must have been there before the kernels ahead were launched: it is read early.
    """
    num_rows, width = residual_TE.shape
    # For a norm a program must have the whole row.
    block = triton.next_power_of_2(width if norm else min(width, _PIECE))
    pieces = triton.cdiv(width, block)
    grid = min(num_rows, _most_programs(block, residual_TE.device) // pieces), pieces
    return _launch(_mailed_sum_kernel, grid, block, residual_TE, part_TE, mail, rank, norm)


def add_mailed_shares_triton(
    residual_TE: torch.Tensor,
    part_TE: torch.Tensor,
    mail: Mail,
    rank: int,
    norm: tuple[torch.Tensor, float] | None = None,
) -> torch.Tensor | None:
    """The same where residuals are equal too: each rank adds a share of the rows, which it is sent,
    and sends the sums to all others. That is 2 (R - 1) / R of a part's bytes instead of R - 1."""
    num_ranks = len(mail.boxes)
    share = -(-len(residual_TE) // num_ranks)
    # For the share of each rank. The same program has the same rows on all ranks: on one it adds
    # them, on the others it waits for them.
    block = triton.next_power_of_2(residual_TE.shape[1])
    programs = min(share, _most_programs(block, residual_TE.device) // num_ranks)
    grid = num_ranks * programs, 1
    kernel, sizes = _mailed_shares_kernel, (share, programs)
    return _launch(kernel, grid, block, residual_TE, part_TE, mail, rank, norm, *sizes)


def _most_programs(block: int, device: torch.device) -> int:
    return num_sms(device) * _WARPS // row_warps(block)


def _launch(
    kernel: Any,
    grid: tuple[int, int],
    block: int,
    residual_TE: torch.Tensor,
    part_TE: torch.Tensor,
    mail: Mail,
    rank: int,
    norm: tuple[torch.Tensor, float] | None,
    *sizes: int,
) -> torch.Tensor | None:
    """`sizes`: what the kernel takes behind the number of rows. Returned is the norm, if there is
    one."""
    assert residual_TE.is_contiguous()
    assert part_TE.is_contiguous()
    num_rows, width = residual_TE.shape
    weight, eps = norm or (None, 0.0)
    normed_TE = None if weight is None else torch.empty_like(residual_TE)
    overlap, box = overlaps_launches(residual_TE.device), mail.boxes[rank]
    crowded = 2 * grid[0] * grid[1] > _most_programs(block, residual_TE.device)
    kernel[grid](
        residual_TE,
        part_TE.view(box.dtype),
        mail.boxes,
        mail.released,
        weight,
        normed_TE,
        eps,
        box.stride(0),
        num_rows,
        *sizes,
        WIDTH=width,
        RANK=rank,
        NUM_RANKS=len(mail.boxes),
        BLOCK=block,
        # The compiler must know of 32 bits that they lie as one, in every line too.
        PAIRED=box.itemsize == 2 and width % 16 == 0 and block >= _LEAST_PAIRED,
        PDL=overlap,
        num_warps=row_warps(block),
        maxnreg=REGISTERS if crowded else None,
        launch_pdl=overlap,
    )
    return normed_TE

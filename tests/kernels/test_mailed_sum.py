"""Sums of parts that ranks send each other: the kernels of one rank, whose peers the test plays."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from engine_service.kernels import mailed_sum
from engine_service.kernels.mailed_sum import (
    EMPTY,
    Mail,
    add_mailed_shares_triton,
    add_mailed_triton,
    release,
    words_of,
)
from engine_service.kernels.peer_sum import add_parts_triton
from tests.kernels.test_peer_sum import device, draw, interpreted, shared

MOST = 40
"""Rows that boxes have room for."""
Norm = tuple[torch.Tensor, float]
Add = Callable[..., torch.Tensor | None]


def empty_mail(num_ranks: int, width: int, dtype: torch.dtype) -> Mail:
    size, words = (num_ranks, MOST, width), words_of(dtype)
    boxes = [torch.full(size, EMPTY, dtype=words, device=device) for _ in range(num_ranks)]
    return Mail(tuple(boxes), torch.zeros(1, dtype=torch.int32, device=device))


def rows_of(rank: int, num_ranks: int, num_rows: int) -> slice:
    """The share that a rank adds."""
    share = -(-num_rows // num_ranks)
    return slice(rank * share, min(rank * share + share, num_rows))


def as_words(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(words_of(x.dtype)).to(device)


def send(mail: Mail, rank: int, parts: list[torch.Tensor], total: torch.Tensor | None) -> None:
    """What the others write to `rank`: their parts whole; or, if all get the sums of `total`, parts
    of its rows and sums of theirs."""
    size, num_rows = len(parts), len(parts[0])
    own = slice(0, num_rows) if total is None else rows_of(rank, size, num_rows)
    for peer in range(size):
        if peer != rank:
            box = mail.boxes[rank][peer]
            box[own] = as_words(parts[peer][own])
            if total is not None:
                theirs = rows_of(peer, size, num_rows)
                box[theirs] = as_words(total[theirs])


def add_as(
    rank: int,
    parts: list[torch.Tensor],
    residual: torch.Tensor,
    norm: Norm | None,
    total: torch.Tensor | None,
) -> tuple[Mail, torch.Tensor, torch.Tensor | None]:
    """(mail, sum, norm) of one rank, by shares if `total` is what they come to."""
    mail = empty_mail(len(parts), residual.shape[1], residual.dtype)
    send(mail, rank, parts, total)
    own, add = residual.to(device, copy=True), add_mailed_triton
    if total is not None:
        add = add_mailed_shares_triton
    normed = add(own, parts[rank].to(device), mail, rank, norm)
    return mail, own.cpu(), None if normed is None else normed.cpu()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("num_ranks", "rows", "width"),
    [(2, 1, 64), (2, 3, 1000), (3, 17, 1024), (4, 5, 2504), (4, 35, 520), (2, 40, 96)],
)
@pytest.mark.parametrize("by_shares", [False, True])
def test_all_ranks_get_what_reading_all_parts_gives(
    monkeypatch: pytest.MonkeyPatch,
    num_ranks: int,
    rows: int,
    width: int,
    dtype: torch.dtype,
    by_shares: bool,
    seed: int,
) -> None:
    """Bit for bit, the norm too, and without one the same sums. All is sent that others wait for,
    and everything taken out. Also where programs have several rows, or some rank has none."""
    monkeypatch.setattr(mailed_sum, "_most_programs", lambda block, device: 12)
    residual, parts, norm = draw(num_ranks, rows, width, dtype, seed)
    want = residual.to(device, copy=True)
    want_normed = add_parts_triton(want, shared(parts, 0), 0, norm)
    assert want_normed is not None
    want, want_normed = want.cpu(), want_normed.cpu()
    total = want if by_shares else None
    for rank in range(num_ranks):
        mail, added, normed = add_as(rank, parts, residual, norm, total)
        _, alone, none = add_as(rank, parts, residual, None, total)
        assert none is None
        assert normed is not None
        assert torch.equal(added, want)
        assert torch.equal(alone, want)
        assert torch.equal(normed, want_normed)
        assert bool((mail.boxes[rank] == EMPTY).all()), "something was not taken out"
        for peer in range(num_ranks):
            if peer == rank:
                continue
            expected = torch.full((MOST, width), EMPTY, dtype=words_of(dtype), device=device)
            if by_shares:
                theirs, mine = (rows_of(one, num_ranks, rows) for one in (peer, rank))
                expected[theirs] = as_words(parts[rank][theirs])
                expected[mine] = as_words(want[mine])
            else:
                expected[:rows] = as_words(parts[rank])
            assert torch.equal(mail.boxes[peer][rank], expected), "not what the other waits for"


def start(add: Add, residual: torch.Tensor, part: torch.Tensor, mail: Mail) -> threading.Thread:
    """The kernel of rank 1 in a thread, which waits for its peer."""
    args = (residual, part, mail, 1)
    thread = threading.Thread(target=add, args=args, daemon=True)
    thread.start()
    thread.join(0.2)
    return thread


@interpreted
@pytest.mark.parametrize("width", [64, 512])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("add", [add_mailed_triton, add_mailed_shares_triton])
@pytest.mark.parametrize("late", [0, 1])
def test_it_waits_for_every_number(add: Add, late: int, width: int, dtype: torch.dtype) -> None:
    """Of a part and, by shares, of the sums of another: the last 32 bits come late, in row 0, which
    is the other's, or in row 1, which is its own."""
    parts = [torch.full((2, width), 2.0 + rank, dtype=dtype) for rank in range(2)]
    mail, residual = empty_mail(2, width, dtype), torch.ones(2, width, dtype=dtype)
    total = torch.full((2, width), 6.0, dtype=dtype)
    send(mail, 1, parts, total if add is add_mailed_shares_triton else None)
    box = mail.boxes[1][0][late, -4 // dtype.itemsize :]
    held = box.clone()
    box.fill_(EMPTY)
    thread = start(add, residual, parts[1], mail)
    assert thread.is_alive(), "it has not waited"
    box.copy_(held)
    thread.join(10.0)
    assert not thread.is_alive()
    assert torch.equal(residual, total)


@interpreted
@pytest.mark.parametrize("late", [0, 2])
@pytest.mark.parametrize("add", [add_mailed_triton, add_mailed_shares_triton])
def test_it_waits_for_every_rank(add: Add, late: int) -> None:
    """One of two others is late with the first number of a row that this rank adds."""
    parts = [torch.full((3, 64), 2.0 + rank) for rank in range(3)]
    mail, residual, total = empty_mail(3, 64, torch.float32), torch.ones(3, 64), torch.ones(3, 64)
    total += 9.0
    send(mail, 1, parts, total if add is add_mailed_shares_triton else None)
    mail.boxes[1][late, 1, 0] = EMPTY
    thread = start(add, residual, parts[1], mail)
    assert thread.is_alive(), "it has not waited"
    mail.boxes[1][late, 1, 0] = int(as_words(parts[late])[1, 0])
    thread.join(10.0)
    assert not thread.is_alive()
    assert torch.equal(residual, total)


@interpreted
@pytest.mark.parametrize("add", [add_mailed_triton, add_mailed_shares_triton])
def test_it_waits_for_nothing_else(add: Add) -> None:
    """Control: of boxes that are not empty it takes whatever lies there."""
    mail, residual = empty_mail(2, 64, torch.float32), torch.zeros(2, 64)
    for box in mail.boxes:
        box.zero_()
    thread = start(add, residual, torch.ones(2, 64), mail)
    thread.join(10.0)
    assert not thread.is_alive()
    assert residual[1].tolist() == [1.0] * 64


@pytest.mark.parametrize("width", [64, 512])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("by_shares", [False, True])
def test_what_is_no_number_never_looks_as_if_it_had_not_come(
    by_shares: bool, dtype: torch.dtype, width: int
) -> None:
    """All of its bits may be set: it is sent as another one, and every rank gets no number."""
    words = torch.full((4, width), EMPTY, dtype=words_of(dtype))
    parts, residual = [words.view(dtype)] * 2, torch.zeros(4, width, dtype=dtype)
    another = torch.full((4, width), float("nan"), dtype=dtype)
    for rank in range(2):
        total = another if by_shares else None
        mail, added, _ = add_as(rank, _others(parts, another, rank), residual, None, total)
        assert bool(added.isnan().all())
        sent = mail.boxes[1 - rank][rank][:4].cpu()
        # Of 512, pairs are looked at.
        seen = sent if width == 64 else sent.view(torch.int32)
        assert not bool((seen == EMPTY).any())
        assert bool(sent.view(dtype).isnan().all())


def _others(parts: list[torch.Tensor], sent: torch.Tensor, rank: int) -> list[torch.Tensor]:
    """Own part as it is, the others' as they are sent."""
    return [part if peer == rank else sent for peer, part in enumerate(parts)]


@interpreted
@pytest.mark.parametrize("add", [add_mailed_triton, add_mailed_shares_triton])
def test_a_released_rank_waits_for_nobody(add: Add) -> None:
    """In the launch that waits, and in later ones."""
    mail, residual, part = empty_mail(2, 64, torch.float32), torch.zeros(2, 64), torch.ones(2, 64)
    thread = start(add, residual, part, mail)
    assert thread.is_alive(), "it has not waited"
    release(mail)
    thread.join(10.0)
    assert not thread.is_alive()
    for _ in range(3):
        add(residual, part, mail, 1)

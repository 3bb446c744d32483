"""Sums of which every rank adds a share of the rows: the kernel of one rank, whose peers the test
plays."""

from __future__ import annotations

import pytest
import torch

from engine_service.kernels import split_sum
from engine_service.kernels.peer_sum import add_parts_triton, release
from engine_service.kernels.split_sum import add_parts_split_triton
from tests.kernels.test_peer_sum import LATER, add_beside, device, draw, interpreted, shared

Norm = tuple[torch.Tensor, float]


def rows_of(rank: int, num_ranks: int, num_rows: int) -> slice:
    """The share that a rank adds."""
    share = -(-num_rows // num_ranks)
    return slice(rank * share, min(rank * share + share, num_rows))


def by_all(
    parts: list[torch.Tensor], residual: torch.Tensor, norm: Norm | None
) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    """What every rank has got: first each writes its share to the others, then they read those."""
    size, written = len(parts), [part.clone() for part in parts]
    for rank in range(size):
        mine, own = (
            shared([part.clone() for part in parts], rank),
            rows_of(rank, size, len(residual)),
        )
        add_parts_split_triton(residual.to(device, copy=True), mine, rank, norm)
        for peer in range(size):
            if peer != rank:
                written[peer][own] = mine.parts[peer].cpu()[own]
    got = []
    for rank in range(size):
        own = rows_of(rank, size, len(residual))
        now = [part.clone() for part in written]
        for peer in range(size):
            now[peer][own] = parts[peer][own]
        total = residual.to(device, copy=True)
        normed = add_parts_split_triton(total, shared(now, rank), rank, norm)
        got.append((total.cpu(), None if normed is None else normed.cpu()))
    return got


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("num_ranks", "rows", "width"),
    [(2, 1, 64), (3, 7, 1000), (4, 5, 520), (4, 9, 64), (2, 35, 96)],
)
def test_every_rank_gets_what_reading_all_parts_whole_gives(
    monkeypatch: pytest.MonkeyPatch,
    num_ranks: int,
    rows: int,
    width: int,
    dtype: torch.dtype,
    seed: int,
) -> None:
    """Also where rows do not divide by ranks, where some rank has none, and where programs have
    several."""
    monkeypatch.setattr(split_sum, "num_sms", lambda device: 4)
    residual, parts, norm = draw(num_ranks, rows, width, dtype, seed)
    want = residual.to(device, copy=True)
    want_normed = add_parts_triton(want, shared(parts, 0), 0, norm)
    assert want_normed is not None
    for (total, normed), (alone, none) in zip(
        by_all(parts, residual, norm), by_all(parts, residual, None), strict=True
    ):
        assert normed is not None
        assert none is None
        assert torch.equal(total, want.cpu())
        assert torch.equal(normed, want_normed.cpu())
        assert torch.equal(alone, want.cpu())


def test_a_share_alone_is_not_the_sum() -> None:
    """Control: without what the others write, their rows are what they were not."""
    parts = [torch.full((8, 64), rank + 1.0) for rank in range(4)]
    total = torch.zeros(8, 64, device=device)
    add_parts_split_triton(total, shared(parts, 1), 1)
    assert total[:, 0].tolist() == [2, 2, 10, 10, 2, 2, 2, 2]


def test_both_kernels_count_on() -> None:
    """Each leaves its blocks' counts where the other goes on; all peers are told, also those that
    do not wait for it."""
    mine = shared([torch.ones(6, 64)] * 3, 1)
    residual = torch.zeros(6, 64, device=device)
    for turn, add in enumerate((add_parts_split_triton, add_parts_triton), 1):
        add(residual, mine, 1)
        for told in (mine.turns, mine.signals[0][1], mine.signals[2][1]):
            assert told[:6].tolist() == [turn] * 6
        assert mine.turns[6] == 0
        assert mine.signals[0][1, 6] == LATER, "a block that was not launched told something"


@interpreted
@pytest.mark.parametrize("turns", [0, 5, 2**31 - 2, 2**31 - 1, -(2**31), -1])
@pytest.mark.parametrize("owner", [0, 1])
def test_it_waits_for_parts_and_for_others_rows(turns: int, owner: int) -> None:
    """The row of rank 0 and that of this rank, which is rank 1; also where the count goes over the
    end of its numbers."""
    mine = shared([torch.zeros(2, 64), torch.ones(2, 64)], 1, told=turns)
    mine.turns.fill_(turns)
    mine.signals[1][0, 1 - owner] += 1
    residual = torch.zeros(2, 64)
    thread = add_beside(mine, residual, add_parts_split_triton)
    assert thread.is_alive(), "it has not waited"
    assert not residual[owner].any()
    (mine.parts[0] if owner else mine.parts[1])[owner] = 3.0
    mine.signals[1][0, owner] += 1
    thread.join(10.0)
    assert not thread.is_alive()
    assert residual[owner].tolist() == [4.0 if owner else 3.0] * 64
    assert mine.parts[0][1].tolist() == residual[1].tolist(), "its row is not the other's"
    assert mine.signals[0][1, :2].tolist() == mine.turns[:2].tolist(), "it has told nobody"


@interpreted
@pytest.mark.parametrize("turns", [0, 2**31 - 1])
@pytest.mark.parametrize("met", [0, 1])
def test_a_released_rank_waits_for_nobody(turns: int, met: int) -> None:
    """For parts or for rows, and in later launches."""
    mine = shared([torch.zeros(2, 64), torch.ones(2, 64)], 1, told=turns)
    mine.turns.fill_(turns)
    mine.signals[1][0, met] += 1
    residual = torch.zeros(2, 64)
    thread = add_beside(mine, residual, add_parts_split_triton)
    assert thread.is_alive(), "it has not waited"
    release(mine, 1)
    thread.join(10.0)
    assert not thread.is_alive()
    for _ in range(3):
        add_parts_split_triton(residual, mine, 1)

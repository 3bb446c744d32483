"""Layers between sums of ranks that are still being made, piece by piece: CPU tensors that become
right when their piece is taken."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from engine_service.beside import Summed
from engine_service.distributed import Group
from engine_service.kernels.norm import rms_norm_ref
from engine_service.layers.ahead import Ahead
from engine_service.layers.feed_forward import FeedForward
from engine_service.layers.linear import Linear
from engine_service.layers.norm import RMSNorm
from engine_service.layers.slots import Share
from engine_service.pushes import MakeRows
from engine_service.schemes.unquantized import Unquantized

ROWS, FIRST, WIDTH, INNER = 10, 3, 16, 24
WHERE: dict[str, Any] = {"device": torch.device("cpu"), "dtype": torch.float32}
Norm = tuple[torch.Tensor, float]


@dataclass
class Arriving:
    """A piece that comes when it is taken."""

    rows: slice
    is_last: bool
    come: Callable[[], None]
    takes: int = 0

    @contextmanager
    def taken(self) -> Iterator[None]:
        self.takes += 1
        self.come()
        yield


@dataclass
class Peers:
    """The other rank computes the same: sums are twice the part, at once or in pieces."""

    in_pieces: bool
    asked: list[bool] = field(default_factory=list)
    pieces: list[Arriving] = field(default_factory=list)

    def fit(self, residual: torch.Tensor) -> bool:
        return True

    def add_sum(
        self,
        site: int,
        residual: torch.Tensor,
        make: MakeRows,
        norm: Norm | None = None,
        *,
        inputs: int = 0,
        in_pieces: bool = False,
    ) -> Summed:
        self.asked.append(in_pieces)
        part = make(slice(None), None).clone()
        normed = torch.full_like(residual, torch.nan)

        def come(rows: slice) -> None:
            residual[rows] += 2 * part[rows]
            if norm is not None:
                normed[rows] = rms_norm_ref(residual[rows], *norm)

        if not (in_pieces and self.in_pieces):
            come(slice(None))
            return Summed(None if norm is None else normed)
        runs = slice(0, FIRST), slice(FIRST, ROWS)
        self.pieces = [
            Arriving(rows, rows.stop == ROWS, lambda rows=rows: come(rows)) for rows in runs
        ]
        return Summed(normed, self.pieces)  # type: ignore[arg-type]


def layers(peers: Peers, seed: int) -> tuple[Linear, RMSNorm, FeedForward, RMSNorm]:
    """(output, norm, feed-forward, norm)."""
    torch.manual_seed(seed)
    group = replace(Group(0, 2), peers=peers)  # type: ignore[arg-type]
    whole, half = Share.all_of(WIDTH), Share.even(2 * WIDTH, group)
    scheme = Unquantized()
    output = Linear(half, {"o": (whole,)}, bias=False, scheme=scheme, group=group, **WHERE)
    feed_forward = FeedForward(WIDTH, 2 * INNER, bias=False, scheme=scheme, group=group, **WHERE)
    norms = [RMSNorm(WIDTH, 1e-6, **WHERE) for _ in "ab"]
    for layer in (output, feed_forward, *norms):
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    return output, norms[0], feed_forward, norms[1]


def compute(peers: Peers, seed: int) -> tuple[torch.Tensor, Ahead]:
    """(residual, what lies ahead of the next layer) of the second half of a layer."""
    output, inner_norm, feed_forward, before = layers(peers, seed)
    residual, mixed = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    ahead = output.add(residual, mixed, inner_norm, in_pieces=True)
    return residual, feed_forward(residual, ahead, before)


@torch.inference_mode()
def test_pieces_come_to_what_whole_sums_do(seed: int) -> None:
    pieces = Peers(in_pieces=True)
    residual, ahead = compute(pieces, seed)
    want_residual, want = compute(Peers(in_pieces=False), seed)
    torch.testing.assert_close(residual, want_residual, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ahead.normed(), want.normed(), rtol=1e-4, atol=1e-4)
    assert [piece.takes for piece in pieces.pieces] == [1, 1]
    # The sum behind the feed-forward layer is waited for whole: the next product is too small.
    assert pieces.asked == [True, False]


@torch.inference_mode()
def test_the_first_rows_are_computed_before_the_others_have_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    peers = Peers(in_pieces=True)
    output, inner_norm, feed_forward, _ = layers(peers, 0)
    residual = torch.randn(ROWS, WIDTH)
    inner = output.add(residual, torch.randn(ROWS, WIDTH), inner_norm, in_pieces=True)
    taken: list[list[int]] = []
    real = feed_forward.gate_up.forward

    def forward(*args: Any, **options: Any) -> torch.Tensor:
        taken.append([piece.takes for piece in peers.pieces])
        return real(*args, **options)

    monkeypatch.setattr(feed_forward.gate_up, "forward", forward)
    feed_forward(residual, inner)
    assert taken == [[1, 0], [1, 1]]


@torch.inference_mode()
def test_what_is_read_too_early_is_not_there() -> None:
    """Control: x as it lies, without its pieces."""
    peers = Peers(in_pieces=True)
    output, inner_norm, feed_forward, _ = layers(peers, 0)
    inner = output.add(
        torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH), inner_norm, in_pieces=True
    )
    read = feed_forward(torch.zeros(ROWS, WIDTH), inner._replace(pieces=()))
    assert read.x_TE.isnan().all()


@pytest.mark.parametrize(("inner", "takes"), [(12800, True), (8192, True), (8176, False)])
def test_narrow_layers_wait_for_all_of_a_sum(inner: int, takes: bool) -> None:
    """Gate and up of half of `inner` each; a quarter of a narrow product ends before the sum."""
    scheme, one = Unquantized(), {"device": torch.device("meta"), "dtype": torch.bfloat16}
    layer = FeedForward(WIDTH, inner // 2, bias=False, scheme=scheme, **one)
    assert layer.takes_pieces is takes

"""Confidence from hidden states, a piece of logits at a time, against logits multiplied at once."""

from __future__ import annotations

import math
import random
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch.nn import functional

from engine_service.kernels import head_confidence
from engine_service.kernels.confidence import (
    PIECE,
    Confidence,
    confidence_of_pieces,
    confidence_ref,
    confidence_triton,
)
from engine_service.kernels.head_confidence import (
    PIECE_BYTES,
    head_confidence_triton,
    head_pieces,
    piece_width,
)
from engine_service.kernels.jit import INTERPRETED
from engine_service.kernels.streams import Streams
from engine_service.kernels.vocab_tiles import TILE
from engine_service.sampling.rng import Purpose, draw_keys, gumbel

device = "cuda" if torch.cuda.is_available() else "cpu"
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
ODD = 2 * TILE + 333


def whole_numbers(rows: int, vocab: int, dtype: torch.dtype, spread: int = 3):
    """Hidden states and a head whose logits are exact in every format and order of summing, and of
    which many are equal."""
    x = torch.randint(-spread, spread + 1, (rows, 8)).to(dtype)
    return x, torch.randint(-spread, spread + 1, (vocab, 8)).to(dtype)


def on(*tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    return [None if one is None else one.to(device) for one in tensors]


def check(got: Confidence, want: Confidence, *, rtol: float, atol: float) -> None:
    assert got.token_ids.tolist() == want.token_ids.tolist()
    for name in ("probs", "margin", "entropy"):
        value, expected = getattr(got, name).cpu(), getattr(want, name)
        torch.testing.assert_close(value, expected.to(value.dtype), rtol=rtol, atol=atol, msg=name)


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of one tile."""
    monkeypatch.setattr(head_confidence, "PIECE_BYTES", 1)


@dtypes
@pytest.mark.parametrize("vocab", [2, 33, TILE + 1, ODD])
@pytest.mark.usefixtures("narrow")
def test_kernel_equals_the_whole_product(vocab: int, dtype: torch.dtype, seed: int) -> None:
    torch.manual_seed(seed)
    x, weight = whole_numbers(3, vocab, dtype)
    logits = functional.linear(x, weight)
    banned = torch.tensor([vocab - 1, int(logits[0].argmax())]) if vocab > 8 else None
    want = confidence_ref(logits, banned)
    there, head, ids = on(x, weight, banned)
    check(head_confidence_triton(there, head, None, ids), want, rtol=3e-5, atol=3e-6)
    if banned is not None:
        free = head_confidence_triton(there, head)
        assert free.token_ids[0].item() != want.token_ids[0].item()
        turned = head_confidence_triton(there, head.flip(0), None, ids)
        assert turned.token_ids.tolist() != want.token_ids.tolist()


@pytest.mark.parametrize("more", [16, 5])
@pytest.mark.parametrize("width", [1, 2, 3, 4], ids=lambda width: f"{width} tiles")
def test_numbers_do_not_depend_on_the_pieces(
    width: int, more: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last bit, and they are those of the kernel for whole logits. In a vocabulary that is
    no multiple of 16 (no published one) some lines are not aligned: a GPU's threads then hold
    other ids of a tile each, and add them up in another order."""
    torch.manual_seed(seed)
    x, weight = on(*whole_numbers(2, 3 * TILE + more, torch.float32))
    want = confidence_triton(functional.linear(x, weight))
    monkeypatch.setattr(head_confidence, "PIECE_BYTES", width * 2 * 4 * TILE)
    assert piece_width(2, len(weight), x.dtype) == {1: 1, 2: 2, 3: 2, 4: 4}[width] * TILE
    for value, same in zip(head_confidence_triton(x, weight), want, strict=True):
        if INTERPRETED or more % 16 == 0:
            assert torch.equal(value, same)
        torch.testing.assert_close(value, same, rtol=2e-6, atol=1e-6)


@pytest.mark.usefixtures("narrow")
def test_the_lowest_of_equals_wins_across_pieces() -> None:
    weight = torch.full((2 * TILE + 5, 4), -3.0)
    for row, places in enumerate([[17, 4], [TILE, 2 * TILE + 4], [TILE - 1, TILE], [2 * TILE + 4]]):
        weight[places, row] = 20.0
    x, weight = on(torch.eye(4), weight)
    for got in (
        head_confidence_triton(x, weight),
        confidence_of_pieces(head_pieces(x, weight, TILE)),
        confidence_of_pieces(head_pieces(x, weight, 5)),
    ):
        assert got.token_ids.tolist() == [4, TILE, TILE - 1, 2 * TILE + 4]
        assert got.margin[:3].abs().max().item() == 0
        assert got.margin[3].item() > 0.99


@pytest.mark.usefixtures("narrow")
def test_second_best_is_found_in_whatever_piece_it_is() -> None:
    vocab, best = 3 * TILE, TILE + 100
    for second in (0, TILE - 1, TILE, best - 1, best + 1, 2 * TILE - 1, 2 * TILE, vocab - 1):
        weight = torch.full((vocab, 1), -30.0)
        weight[best], weight[second] = 2.0, 1.0
        x, there = on(torch.ones(1, 1), weight)
        want = 1 - 2 / (1 + math.e)
        for got in (
            head_confidence_triton(x, there),
            confidence_of_pieces(head_pieces(x, there, 1000)),
        ):
            assert got.token_ids.tolist() == [best]
            assert got.margin.item() == pytest.approx(want, rel=1e-4), second


def random_streams(rows: int) -> Streams:
    heat = torch.tensor([0.0, 0.3, 1.0, 1.7])[torch.randint(4, (rows,))]
    seeds = torch.randint(-(2**63), 2**63 - 1, (rows,))
    lines = torch.randperm(rows)
    return Streams(lines, torch.arange(rows) * 7, torch.arange(rows), heat, seeds, Purpose.TOKEN)


def drawn_slowly(logits: torch.Tensor, streams: Streams, banned: torch.Tensor) -> Confidence:
    """Scores of all ids at once; probability of the token by the softmax itself."""
    wide = logits.float().index_fill(1, banned, -torch.inf)
    heat, seeds = streams.temperature[streams.rows], streams.seeds[streams.rows]
    keys = draw_keys(seeds, Purpose.TOKEN, streams.positions, streams.draws)
    noise = gumbel(keys, torch.arange(logits.shape[1]))
    noisy = wide * torch.where(heat > 0, heat, 1).reciprocal()[:, None] + noise
    token_ids = torch.where((heat > 0)[:, None], noisy, wide).argmax(dim=1)
    probs = wide.softmax(dim=1).gather(1, token_ids[:, None])[:, 0]
    return confidence_ref(logits, banned)._replace(token_ids=token_ids, probs=probs)


@dtypes
@pytest.mark.usefixtures("narrow")
def test_rows_with_a_temperature_draw_as_from_whole_logits(dtype: torch.dtype, seed: int) -> None:
    torch.manual_seed(seed)
    x, weight = whole_numbers(4, TILE + 333, dtype, spread=1)
    banned, streams = torch.tensor([3, TILE + 9]), random_streams(4)
    want = drawn_slowly(functional.linear(x, weight), streams, banned)
    there, head, ids, *columns = on(x, weight, banned, *streams[:5])
    got = head_confidence_triton(there, head, Streams(*columns, Purpose.TOKEN), ids)
    check(got, want, rtol=5e-5, atol=3e-6)
    if (streams.temperature > 0).any():
        other = Streams(*columns[:2], columns[2] + 100, *columns[3:], Purpose.TOKEN)
        again = head_confidence_triton(there, head, other, ids)
        cold = streams.temperature[streams.rows] == 0
        same = again.token_ids.cpu() == want.token_ids
        assert same[cold].all()
        assert not same[~cold].all()


@pytest.mark.filterwarnings("ignore:invalid value", "ignore:All-NaN")
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.usefixtures("narrow")
def test_forbidden_and_missing_numbers_count_nothing(temperature: float) -> None:
    weight = torch.full((TILE + 50, 3), -1.0)
    weight[TILE + 9, 0] = 2.0
    weight[[5, 6], 1] = 1.0
    x = torch.tensor([[100.0, 0, 0], [0, 100.0, 0], [0, 0, 1.0]])
    # The interpreter's maximum of NaN and a number is NaN, that of a GPU is the number.
    x[2, 2] = float("-inf") if INTERPRETED else float("nan")
    everything = torch.arange(TILE + 50)
    banned = everything[weight[:, 2] > 0]
    lines = torch.arange(3)
    heat = torch.full((3,), temperature)
    columns = on(lines, lines, lines, heat, lines)
    there, head, ids = on(x, weight, banned)
    got = head_confidence_triton(there, head, Streams(*columns, Purpose.TOKEN), ids)
    assert got.token_ids[0].item() == TILE + 9
    assert got.token_ids[1].item() in ((5,) if temperature == 0 else (5, 6))
    torch.testing.assert_close(got.probs[:2].cpu(), torch.tensor([1.0, 0.5]))
    torch.testing.assert_close(got.entropy[:2].cpu(), torch.tensor([0.0, math.log(2)]))
    assert 0 <= got.token_ids[2].item() < TILE + 50


@pytest.mark.parametrize("width", [9, 64, 10_000])
def test_plain_pieces_choose_the_tokens_of_whole_logits(width: int, seed: int) -> None:
    """The same tokens at every scale in float32; of equal logits, probabilities to 1e-6."""
    generator = torch.Generator().manual_seed(seed)
    for scale in (0.01, 0.3, 1.0, 5.0, 40.0):
        x = torch.randn(40, 24, generator=generator)
        weight = torch.randn(301, 24, generator=generator) * scale
        banned = torch.randperm(301, generator=generator)[:3]
        got = confidence_of_pieces(head_pieces(x, weight, width), banned)
        whole = confidence_ref(functional.linear(x, weight), banned)
        assert got.token_ids.tolist() == whole.token_ids.tolist()
        assert not torch.isin(got.token_ids, banned).any()
        # Logits of 200 are rounded to 1e-5, differently in products of other widths.
        laid = torch.cat(list(head_pieces(x, weight, width)), dim=1)
        check(got, confidence_ref(laid, banned), rtol=2e-6, atol=1e-6)
        wide = confidence_of_pieces(head_pieces(x.double(), weight.double(), width), banned)
        exact = confidence_ref(functional.linear(x.double(), weight.double()), banned)
        check(wide, exact, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("width", [3, 50, 10_000])
def test_plain_pieces_of_many_equal_logits(width: int, seed: int) -> None:
    torch.manual_seed(seed)
    for spread in (1, 2):
        x, weight = whole_numbers(50, 400, torch.float32, spread)
        want = confidence_ref(functional.linear(x, weight))
        assert (want.margin == 0).any()
        check(confidence_of_pieces(head_pieces(x, weight, width)), want, rtol=2e-5, atol=1e-6)


def test_plain_pieces_draw_by_the_scores_given(seed: int) -> None:
    torch.manual_seed(seed)
    x, weight = torch.randn(30, 8), torch.randn(200, 8)
    noise = torch.randn(30, 200) * 4
    logits = functional.linear(x, weight)
    chosen = (logits + noise).argmax(dim=1)
    assert (chosen != logits.argmax(dim=1)).any()
    got = confidence_of_pieces(
        head_pieces(x, weight, 33),
        rescore=lambda piece, first: piece + noise[:, first : first + piece.shape[1]],
    )
    probs = logits.softmax(dim=1).gather(1, chosen[:, None])[:, 0]
    want = confidence_ref(logits)._replace(token_ids=chosen, probs=probs)
    check(got, want, rtol=2e-5, atol=1e-6)


def watched(pieces: Iterator[torch.Tensor], alive: list[int]) -> Iterator[torch.Tensor]:
    """The same pieces; before each is made, how many of the earlier ones are still there."""
    made: list[weakref.ref[torch.Tensor]] = []
    while True:
        alive.append(sum(one() is not None for one in made))
        piece = next(pieces, None)
        if piece is None:
            return
        made.append(weakref.ref(piece))
        yield piece
        del piece


def test_one_piece_exists_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = on(torch.randn(2, 4), torch.randn(3 * TILE, 4))
    alive: list[int] = []
    confidence_of_pieces(watched(head_pieces(x, weight, TILE), alive))
    assert alive == [0] * 4
    alive.clear()
    monkeypatch.setattr(head_confidence, "PIECE_BYTES", 1)
    monkeypatch.setattr(
        head_confidence,
        "head_pieces",
        lambda x, weight, width: watched(head_pieces(x, weight, width), alive),
    )
    head_confidence_triton(x, weight)
    assert alive == [0] * 4
    alive.clear()
    held = list(watched(head_pieces(x, weight, TILE), alive))
    assert alive == [0, 1, 2, len(held)]


def test_pieces_are_whole_tiles_of_at_most_their_bytes(seed: int) -> None:
    rng = random.Random(seed)
    assert PIECE % TILE == 0
    for _ in range(500):
        rows, vocab = rng.randint(1, 5000), rng.randint(2, 300_000)
        dtype = rng.choice([torch.float32, torch.bfloat16])
        width = piece_width(rows, vocab, dtype)
        assert width % TILE == 0
        assert rows * width * dtype.itemsize <= max(PIECE_BYTES, rows * TILE * dtype.itemsize)
        assert width < vocab + TILE
    assert piece_width(32, 152_064, torch.bfloat16) >= 152_064
    assert piece_width(4096, 152_064, torch.bfloat16) == TILE

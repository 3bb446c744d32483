"""Confidence of rows of logits: the kernels against the softmax written out."""

from __future__ import annotations

import math

import pytest
import torch

from engine_service.kernels.confidence import confidence, confidence_ref, confidence_triton
from engine_service.kernels.jit import INTERPRETED
from engine_service.kernels.vocab_tiles import TILE

device = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("vocab", "scale"),
    [(2, 4.0), (9, 0.1), (33, 4.0), (TILE, 4.0), (TILE + 1, 0.1), (TILE + 777, 4.0)],
)
def test_kernel_equals_reference(vocab: int, dtype: torch.dtype, scale: float, seed: int) -> None:
    torch.manual_seed(seed)
    logits = (torch.randn(3, vocab) * scale).to(dtype)
    banned = torch.tensor([vocab - 1, int(logits[0].argmax())]) if vocab > 8 else None
    want = confidence_ref(logits, banned)
    got = confidence_triton(logits.to(device), None if banned is None else banned.to(device))
    assert got.token_ids.tolist() == want.token_ids.tolist()
    for name in ("probs", "margin", "entropy"):
        values, expected = getattr(got, name).cpu(), getattr(want, name)
        torch.testing.assert_close(values, expected, rtol=3e-5, atol=3e-6, msg=name)
    if banned is not None:
        free = confidence_triton(logits.to(device))
        assert free.token_ids[0].item() != want.token_ids[0].item()
        assert free.probs[0].item() != pytest.approx(want.probs[0].item(), rel=1e-4)


def test_reference_is_the_definition() -> None:
    """Three quarters and a quarter, written out."""
    logits = torch.tensor([[math.log(3.0), 0.0, 50.0]], dtype=torch.float64)
    got = confidence_ref(logits, torch.tensor([2]))
    assert got.token_ids.tolist() == [0]
    assert got.probs.item() == pytest.approx(0.75)
    assert got.margin.item() == pytest.approx(0.5)
    assert got.entropy.item() == pytest.approx(-0.75 * math.log(0.75) - 0.25 * math.log(0.25))
    for value, same in zip(confidence(logits, torch.tensor([2])), got, strict=True):
        torch.testing.assert_close(value, same)


def test_equal_best_logits_have_no_margin_and_the_lowest_id() -> None:
    logits = torch.zeros(4, 2 * TILE + 3)
    for row, places in enumerate([(8, 15), (7, 8), (3, TILE + 3), (2 * TILE, 2 * TILE + 2)]):
        logits[row, list(places)] = 20.0
    got = confidence_triton(logits.to(device))
    assert got.token_ids.tolist() == [8, 7, 3, 2 * TILE]
    assert got.margin.abs().max().item() == 0


def test_second_best_is_found_wherever_it_is() -> None:
    vocab = 2 * TILE
    for second in (0, 99, 101, 103, TILE - 1, TILE, vocab - 1):
        logits = torch.full((1, vocab), -30.0)
        logits[0, 100], logits[0, second] = 2.0, 1.0
        got = confidence_triton(logits.to(device))
        want = 1 - 2 / (1 + math.e)
        assert got.margin.item() == pytest.approx(want, rel=1e-4), second


def test_forbidden_and_missing_numbers_count_nothing() -> None:
    logits = torch.full((3, TILE + 50), float("-inf"))
    logits[0, TILE + 9] = -2.0
    # The interpreter's maximum of NaN and a number is NaN, that of a GPU is the number.
    logits[1:] = float("-inf") if INTERPRETED else float("nan")
    logits[1, [5, 6]] = 1.0
    got = confidence_triton(logits.to(device))
    assert got.token_ids.tolist()[:2] == [TILE + 9, 5]
    torch.testing.assert_close(got.probs[:2].cpu(), torch.tensor([1.0, 0.5]))
    torch.testing.assert_close(got.entropy[:2].cpu(), torch.tensor([0.0, math.log(2)]))
    assert 0 <= got.token_ids[2].item() < TILE + 50
    assert 0 <= got.probs[2].item() <= 1

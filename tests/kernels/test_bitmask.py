"""Bitmasks on logits: the operator and the kernel against single bits in plain Python."""

from __future__ import annotations

import pytest
import torch

from engine_service.kernels.bitmask import apply_bitmask, apply_bitmask_ref, apply_bitmask_triton
from engine_service.kernels.vocab_tiles import TILE

device = "cuda" if torch.cuda.is_available() else "cpu"
NEVER = float("-inf")


def apply_slowly(
    logits: torch.Tensor, bitmask: torch.Tensor, rows: torch.Tensor | None
) -> torch.Tensor:
    out = logits.clone()
    targets = range(len(bitmask)) if rows is None else rows.tolist()
    for row, words in zip(targets, bitmask.tolist(), strict=True):
        for token in range(logits.shape[1]) if row >= 0 else ():
            word = words[token // 32] if token // 32 < len(words) else 0
            if not word >> (token % 32) & 1:
                out[row, token] = NEVER
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("vocab", [1, 32, 77, TILE + 40])
@pytest.mark.parametrize("rows", [None, [3, -1, 0]])
def test_bits_decide(vocab: int, dtype: torch.dtype, rows: list[int] | None, seed: int) -> None:
    torch.manual_seed(seed)
    logits = torch.randn(3 if rows is None else 5, vocab).to(dtype)
    bitmask = torch.randint(-(2**31), 2**31, (3, (vocab + 31) // 32)).to(torch.int32)
    named = None if rows is None else torch.tensor(rows)
    want = apply_slowly(logits, bitmask, named)
    for apply in (apply_bitmask_ref, apply_bitmask, apply_bitmask_triton):
        got = logits.to(device)
        apply(got, bitmask.to(device), None if named is None else named.to(device))
        assert torch.equal(got.cpu(), want)
    if vocab > 32:
        assert not torch.equal(want, apply_slowly(logits, ~bitmask, named))


def test_ids_behind_the_bitmask_are_forbidden() -> None:
    bitmask = torch.full((2, 2), -1, dtype=torch.int32, device=device)
    for apply in (apply_bitmask_ref, apply_bitmask_triton):
        logits = torch.zeros(2, 100, device=device)
        apply(logits, bitmask)
        assert (logits[:, :64] == 0).all()
        assert (logits[:, 64:] == NEVER).all()

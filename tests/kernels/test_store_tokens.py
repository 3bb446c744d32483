"""Decided tokens land where they were decided, with their bits, and nowhere else."""

import pytest
import torch

from engine_service.kernels.store_tokens import (
    store_tokens,
    store_tokens_ref,
    store_tokens_triton,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("count", [1, 2, 16, 37])
@pytest.mark.parametrize("says_final", [True, False])
@pytest.mark.parametrize("store", [store_tokens, store_tokens_ref, store_tokens_triton])
def test_store_tokens(store: object, count: int, says_final: bool, seed: int) -> None:
    """Tables that are slices of wider ones; decisions of one row in a column of a matrix."""
    assert callable(store)
    torch.manual_seed(seed)
    tokens = torch.randint(0, 1 << 40, (6, 30), device=DEVICE)
    fixed = torch.rand(6, 40, device=DEVICE) < 0.5
    places = torch.randperm(6 * 20, device=DEVICE)[:count]
    rows, positions = places // 20, places % 20
    token_ids = torch.randint(0, 1 << 40, (count, 3), device=DEVICE)[:, 1]
    final = torch.rand(count, device=DEVICE) < 0.5 if says_final else None

    want_tokens, want_fixed = tokens.clone(), fixed.clone()
    for index in range(count):
        row, position = int(rows[index]), int(positions[index])
        want_tokens[row, position] = token_ids[index]
        want_fixed[row, position] = final is None or bool(final[index])

    before = tokens.clone()
    store(tokens[:, :20], fixed[:, :20], rows, positions, token_ids, final)
    assert torch.equal(tokens, want_tokens)
    assert torch.equal(fixed, want_fixed)
    assert not torch.equal(tokens, before)

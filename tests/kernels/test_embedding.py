"""Embedding rows are those of the tokens at the given places, bit for bit."""

import pytest
import torch

from engine_service.kernels.embedding import (
    gather_embeddings,
    gather_embeddings_ref,
    gather_embeddings_triton,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [1, 33, 192, 2048, 2500])
@pytest.mark.parametrize("num_tokens", [1, 9])
def test_gather_embeddings(dtype: torch.dtype, width: int, num_tokens: int, seed: int) -> None:
    torch.manual_seed(seed)
    tokens = torch.randint(0, 50, (4, 16)).to(DEVICE).view(-1)
    places = torch.randint(0, 64, (num_tokens,)).to(DEVICE)
    weight = torch.randn(50, width).to(DEVICE, dtype)
    want = torch.stack([weight[int(tokens[int(place)])] for place in places])
    for gather in (gather_embeddings, gather_embeddings_ref, gather_embeddings_triton):
        assert torch.equal(gather(tokens, places, weight), want)
    other = gather_embeddings_triton((tokens + 1) % 50, places, weight)
    assert not torch.equal(other, want)


@pytest.mark.gpu
def test_a_matrix_of_more_than_two_billion_elements(seed: int) -> None:
    torch.manual_seed(seed)
    weight = torch.empty(200_000, 12_288, device=DEVICE, dtype=torch.bfloat16)
    weight[-1] = torch.randn(12_288, device=DEVICE)
    tokens = torch.tensor([199_999], device=DEVICE)
    got = gather_embeddings(tokens, torch.zeros_like(tokens), weight)
    assert torch.equal(got[0], weight[-1])

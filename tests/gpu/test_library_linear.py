"""The library's kernels by name, on a GPU: one answer whichever is taken, and the right one."""

from __future__ import annotations

import random

import pytest
import torch

from engine_service.kernels import library_linear as products
from engine_service.kernels.cublaslt import Cut, Library, open_library
from engine_service.kernels.library_linear import library_linear

pytestmark = pytest.mark.gpu

SIZES = [(6144, 4096), (4096, 12288), (1024, 3072)]


@pytest.fixture
def library() -> Library:
    found = open_library(torch.device("cuda", torch.cuda.current_device()))
    if found is None:
        pytest.skip("no such kernels on this GPU")
    return found


def drawn(num_rows: int, out_size: int, in_size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(num_rows)
    x, weight, residual = (
        torch.randn(size, device="cuda").to(dtype)
        for size in ((num_rows, in_size), (out_size, in_size), (num_rows, out_size))
    )
    return [x, weight * 0.02, residual]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_rows", [1, 17, 64, 333, 1024, 2051])
def test_every_kernel_has_the_same_bits(
    library: Library, num_rows: int, dtype: torch.dtype
) -> None:
    out_size, in_size = random.Random(num_rows).choice(SIZES)
    x, weight, residual = drawn(num_rows, out_size, in_size, dtype)
    exact = x.double() @ weight.double().t()
    answers, added = [], []
    for cut in (*products._ONE_WAVE, *products._WAVES):
        product = library.product(cut, dtype, num_rows, out_size, in_size)
        assert product is not None, cut
        for _ in range(2):  # the second finds the workspace as the first has left it
            out = torch.full((num_rows, out_size), torch.nan, device="cuda", dtype=dtype)
            assert product(x, weight, out, adds=False)
            answers.append(out)
        total = residual.clone()
        assert product(x, weight, total, adds=True)
        added.append(total)
    for found, wanted in ((answers[0], exact), (added[0], exact + residual.double())):
        error = (found.double() - wanted).abs().max() / wanted.abs().max()
        assert error < torch.finfo(dtype).eps
    assert all(torch.equal(one, answers[0]) for one in answers)
    assert all(torch.equal(one, added[0]) for one in added)
    # Negative control: inputs that are split are added in another order.
    half = in_size // 2
    split = (x[:, :half] @ weight[:, :half].t()) + (x[:, half:] @ weight[:, half:].t())
    assert not torch.equal(split, answers[0])


@pytest.mark.parametrize(("num_rows", "in_size"), [(128, 12288), (200, 2560)])
def test_a_chosen_kernel_in_a_graph(library: Library, num_rows: int, in_size: int) -> None:
    x, weight, residual = drawn(num_rows, 4096, in_size, torch.bfloat16)
    assert products._product_of(x, weight) is not None
    exact = x.float() @ weight.float().t()
    own = library_linear(x, weight)
    torch.testing.assert_close(own.float(), exact, rtol=0.01, atol=0.02)
    out = torch.empty_like(own)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert library_linear(x, weight, out=out) is out
    for _ in range(3):
        out.zero_()
        graph.replay()
        assert torch.equal(out, own)
    before = residual.clone()
    assert library_linear(x, weight, residual=residual) is residual
    torch.testing.assert_close(residual.float(), before.float() + exact, rtol=0.01, atol=0.03)
    # What does not lie in one piece is the library's.
    wider = torch.zeros(num_rows, 4104, device="cuda", dtype=torch.bfloat16)
    library_linear(x, weight, out=wider[:, :4096])
    torch.testing.assert_close(wider[:, :4096].float(), exact, rtol=0.01, atol=0.02)
    assert not wider[:, 4096:].any()


def test_what_the_library_does_not_have_is_no_product(library: Library) -> None:
    sizes = (8, 1024, 1024)
    assert library.product(Cut(64, 32, 1), torch.float32, *sizes) is None
    assert library.product(Cut(64, 32, 250), torch.bfloat16, *sizes) is None
    assert library.product(Cut(64, 32, 1), torch.bfloat16, 8, 1024, 1023) is None

"""QuACK's gated product on a GPU: right, whichever its tile, in graphs too."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from engine_service.kernels import gated_product as gated
from engine_service.kernels.activation import silu_mul_ref
from engine_service.kernels.gated_product import gated_product
from engine_service.kernels.linear import linear

pytestmark = pytest.mark.gpu

SIZES = [
    (40, 24576, 4096),
    (64, 12288, 4096),
    (128, 24576, 4096),
    (1000, 25600, 512),
    (512, 12800, 5120),
    (4097, 12288, 1024),
]


@pytest.fixture
def quack() -> gated.Quack:
    device = torch.device("cuda", torch.cuda.current_device())
    if find_spec("quack") is None or torch.cuda.get_device_capability(device)[0] != 9:
        pytest.skip("QuACK is not installed, or this is no Hopper")
    found = gated.open_quack(device)
    assert found is not None, "it does not load"
    return found


def drawn(rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(rows)
    x, weight = (torch.randn(size, inputs, device="cuda").to(dtype) for size in (rows, outputs))
    return [x, weight * inputs**-0.5]


def exact(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return silu_mul_ref(x.float() @ weight.float().t())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "outputs", "inputs"), SIZES)
def test_every_tile_is_right(
    quack: gated.Quack, rows: int, outputs: int, inputs: int, dtype: torch.dtype
) -> None:
    x, weight = drawn(rows, outputs, inputs, dtype)
    want = exact(x, weight)
    for tile in gated.TILES:
        out = torch.full((rows, outputs // 2), torch.nan, device="cuda", dtype=dtype)
        assert quack.multiply(tile, x, weight, out), tile
        error = (out.float() - want).abs().max() / want.abs().max()
        assert error < 2 * torch.finfo(dtype).eps, tile
    # Negative control: halves that change places.
    swapped = exact(x, weight.roll(outputs // 2, 0))
    assert (swapped - want).abs().max() / want.abs().max() > 0.1


@pytest.mark.parametrize(("rows", "outputs", "inputs"), SIZES)
def test_it_is_taken_and_runs_in_a_graph(
    quack: gated.Quack, rows: int, outputs: int, inputs: int
) -> None:
    x, weight = drawn(rows, outputs, inputs, torch.bfloat16)
    own = gated_product(x, weight)
    assert own is not None
    # Kernels are tried when they are first needed, which no graph takes.
    assert torch.equal(linear(x, weight, gated=True), own)
    out = torch.empty_like(own)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert linear(x, weight, gated=True, out=out) is out
    for _ in range(3):
        out.zero_()
        graph.replay()
        assert torch.equal(out, own)

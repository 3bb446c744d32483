"""Products of few rows equal their formula, over formats, sizes, blocks and what is fused."""

import pytest
import torch

from engine_service.kernels.few_rows import Tiles
from engine_service.kernels.small_linear import (
    MAX_ROWS,
    choose_tiles,
    faster_up_to,
    prefers_small,
    small_linear_ref,
    small_linear_triton,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ON_GPU = DEVICE.type == "cuda"
TOLERANCES = {
    torch.float32: 5e-6,
    torch.float16: 4 * 2**-11,
    torch.bfloat16: 4 * 2**-8 if ON_GPU else 4 * 2**-7,
}
"""Of the largest value: gate, up, silu and product are rounded. The CPU's interpreter cuts bfloat16
instead of rounding it."""

MULTIPLY_ADDS = Tiles(4, 256, num_warps=2)
TENSOR_CORES = Tiles(16, 32, num_warps=1, num_stages=3)
SPLIT = Tiles(16, 32, num_warps=1, num_stages=3, split_k=3)
WAYS = [(dtype, MULTIPLY_ADDS) for dtype in TOLERANCES]
# The interpreter cannot multiply bfloat16 matrices.
WAYS += [
    (dtype, tiles)
    for dtype in (torch.float32, torch.float16, *([torch.bfloat16] if ON_GPU else []))
    for tiles in (TENSOR_CORES, SPLIT)
]
ways = pytest.mark.parametrize(("dtype", "tiles"), WAYS, ids=str)

SHAPES = [
    # decoder layers: qkv, output, gate and up, down; then the head
    *[(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (151936, 4096)],
    *[(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (151936, 1024)],
]


class Case:
    """Operands of a product, and what is fused to it."""

    def __init__(
        self, rows: int, out_size: int, in_size: int, dtype: torch.dtype, fused: str = ""
    ) -> None:
        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape).to(DEVICE, dtype)

        self.x, self.weight = 3 * normal(rows, in_size), normal(out_size, in_size) / in_size**0.5
        self.bias = normal(out_size) if "bias" in fused else None
        self.norm = (normal(in_size), 1e-6) if "norm" in fused else None
        self.gated = "gated" in fused
        self.residual = normal(rows, out_size) if "residual" in fused else None

    def kernel(self, tiles: Tiles | None = None) -> torch.Tensor:
        residual = None if self.residual is None else self.residual.clone()
        options = {"norm": self.norm, "gated": self.gated, "residual": residual}
        out = small_linear_triton(self.x, self.weight, self.bias, **options, tiles=tiles)
        assert residual is None or out is residual
        return out

    def wanted(self) -> torch.Tensor:
        def wide(x: torch.Tensor | None) -> torch.Tensor | None:
            return None if x is None else x.double()

        norm = self.norm and (self.norm[0].double(), self.norm[1])
        options = {"norm": norm, "gated": self.gated, "residual": wide(self.residual)}
        return small_linear_ref(self.x.double(), self.weight.double(), wide(self.bias), **options)


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest difference, as a part of the largest value."""
    assert got.shape == want.shape
    return ((got.double() - want).abs().max() / want.abs().max()).item()


@ways
@pytest.mark.parametrize(
    "fused", ["", "bias", "norm", "residual", "gated", "bias norm gated", "bias residual"]
)
def test_fusions(dtype: torch.dtype, tiles: Tiles, fused: str, seed: int) -> None:
    torch.manual_seed(seed)
    case = Case(5, 40, 144, dtype, fused)
    got = case.kernel(tiles)
    assert got.dtype is dtype
    assert error(got, case.wanted()) < TOLERANCES[dtype]


@pytest.mark.parametrize("tiles", [MULTIPLY_ADDS, TENSOR_CORES, SPLIT], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 3, 8, 9, 16])
@pytest.mark.parametrize("sizes", [(2, 8), (6, 48), (34, 256), (18, 330)])
def test_sizes(tiles: Tiles, rows: int, sizes: tuple[int, int], seed: int) -> None:
    """Rows, columns and depths that fill no block, and parts of K that are empty."""
    torch.manual_seed(seed)
    case = Case(rows, *sizes, torch.float32, "norm gated")
    assert error(case.kernel(tiles), case.wanted()) < 1e-5


@pytest.mark.parametrize("rows", [17, MAX_ROWS])
def test_many_rows(rows: int, seed: int) -> None:
    torch.manual_seed(seed)
    case = Case(rows, 34, 96, torch.float16, "residual")
    assert error(case.kernel(), case.wanted()) < TOLERANCES[torch.float16]


def test_a_wrong_result_would_be_seen(seed: int) -> None:
    torch.manual_seed(seed)
    case = Case(4, 32, 64, torch.float16, "norm")
    want = case.wanted()
    case.weight[5, 7] += 4
    assert error(case.kernel(MULTIPLY_ADDS), want) > TOLERANCES[torch.float16]


@ways
def test_rows_do_not_see_each_other(dtype: torch.dtype, tiles: Tiles, seed: int) -> None:
    """Bit for bit, within the rows that the blocks are made for."""
    torch.manual_seed(seed)
    case = Case(8, 40, 144, dtype, "norm gated")
    whole = case.kernel(tiles)
    case.x = torch.cat([case.x[5:], case.x[:4] * 7])
    assert torch.equal(case.kernel(tiles)[:3], whole[5:])


@ways
def test_repeats_are_equal(dtype: torch.dtype, tiles: Tiles, seed: int) -> None:
    """Split sums always run in one order, and every launch leaves the counters as it found them."""
    torch.manual_seed(seed)
    case = Case(3, 50, 200, dtype, "residual")
    first = case.kernel(tiles)
    assert all(torch.equal(case.kernel(tiles), first) for _ in range(20 if ON_GPU else 2))


def test_large_residuals_stay_finite_in_float16(seed: int) -> None:
    """x g exceeds the format long before norm(x) does."""
    torch.manual_seed(seed)
    case = Case(2, 16, 32, torch.float16, "norm")
    case.x = case.x.clamp(-7, 7) * 8000
    case.norm = (torch.full_like(case.x[0], 6), 1e-6)
    for tiles in (MULTIPLY_ADDS, TENSOR_CORES):
        assert error(case.kernel(tiles), case.wanted()) < TOLERANCES[torch.float16]


def test_inputs_need_not_be_contiguous(seed: int) -> None:
    torch.manual_seed(seed)
    case = Case(3, 16, 64, torch.float32)
    case.x = torch.randn(3, 80, device=DEVICE)[:, 8:72]
    assert error(case.kernel(), case.wanted()) < TOLERANCES[torch.float32]


@pytest.mark.parametrize(
    ("rows", "dtype"),
    [(0, torch.float16), (MAX_ROWS + 1, torch.float16), (17, torch.float32), (1, torch.float64)],
)
def test_rows_without_a_kernel_are_refused(rows: int, dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match="no kernel for"):
        Case(rows, 16, 32, dtype).kernel()


def test_other_layouts_are_refused() -> None:
    case = Case(2, 16, 32, torch.float32, "residual")
    case.weight = torch.randn(32, 16, device=DEVICE).t()
    with pytest.raises(ValueError, match="contiguous"):
        case.kernel()


@pytest.mark.parametrize("rows", [1, 4, 8, 16, 32, 64])
@pytest.mark.parametrize(("out_size", "in_size"), SHAPES)
def test_tiles_fill_the_device(rows: int, out_size: int, in_size: int) -> None:
    tiles = choose_tiles(rows, out_size, in_size, torch.bfloat16)
    assert tiles.block_n % 2 == 0
    assert -(-out_size // tiles.block_n) * tiles.split_k >= 64
    assert tiles.split_k == 1 or in_size // tiles.split_k >= tiles.block_k


def test_float32_never_goes_to_tensor_cores() -> None:
    for rows in range(1, 17):
        tiles = choose_tiles(rows, 4096, 4096, torch.float32)
        assert (tiles.num_stages, tiles.split_k) == (0, 1)


def test_where_the_library_is_better() -> None:
    x, weight = torch.zeros(1, 64, dtype=torch.float16), torch.zeros(32, 64, dtype=torch.float16)
    assert not prefers_small(x, weight), "on the CPU"


def test_the_measured_table() -> None:
    """docs/performance.md: one row always, few rows mostly, output heads never."""
    assert faster_up_to(24576, 4096, torch.bfloat16) == 16
    assert faster_up_to(4096, 12288, torch.bfloat16) == 32
    assert faster_up_to(1024, 3072, torch.bfloat16) == 64
    assert faster_up_to(4096, 4096, torch.bfloat16) == 32
    assert faster_up_to(6144, 1024, torch.bfloat16) == 32
    assert faster_up_to(4096, 4096, torch.float32) == 4
    assert faster_up_to(151936, 1024, torch.bfloat16) == 0


@pytest.mark.gpu
def test_where_the_kernel_is_better() -> None:
    def prefers(rows: int, in_size: int = 64, dtype: torch.dtype = torch.bfloat16) -> bool:
        weight = torch.zeros(32, in_size, dtype=dtype, device=DEVICE)
        return prefers_small(torch.zeros(rows, in_size, dtype=dtype, device=DEVICE), weight)

    assert prefers(1)
    assert not prefers(0)
    assert not prefers(MAX_ROWS + 1)
    assert not prefers(1, in_size=72), "rows that do not start at 16 bytes"
    assert not prefers(1, dtype=torch.float64)


@pytest.mark.gpu
def test_a_graph_repeats_the_launches(seed: int) -> None:
    """Four products of a layer in one CUDA graph, where launches may overlap."""
    torch.manual_seed(seed)
    sizes = {"qkv": (384, 256), "down": (256, 1536)}
    cases = {name: Case(8, *size, torch.bfloat16) for name, size in sizes.items()}
    hidden, norm = cases["qkv"].x, (torch.ones(256, dtype=torch.bfloat16, device=DEVICE), 1e-6)

    def layer() -> torch.Tensor:
        wide = small_linear_triton(hidden, cases["qkv"].weight, norm=norm)
        stretched = wide.repeat(1, 4)
        residual = hidden.clone()
        return small_linear_triton(
            stretched, cases["down"].weight, residual=residual, tiles=Tiles(16, 64, 1, 3, 4)
        )

    want = layer()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer()
    for _ in range(5):
        graph.replay()
    assert torch.equal(out, want)

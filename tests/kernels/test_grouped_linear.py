"""Products with the weights of chosen experts equal a sum over tokens written out, over formats,
sizes and choices of experts.
"""

import pytest
import torch

from engine_service.kernels.group_rows import group_rows_triton
from engine_service.kernels.grouped_linear import (
    Tiles,
    choose_tiles,
    grouped_linear_ref,
    grouped_linear_triton,
    mix_experts,
    mix_experts_ref,
    mix_experts_triton,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ON_GPU = DEVICE.type == "cuda"
TOLERANCES = {
    torch.float32: 5e-6,
    torch.float16: 4 * 2**-11,
    torch.bfloat16: 4 * 2**-8 if ON_GPU else 4 * 2**-7,
}
"""Of the largest value. The CPU's interpreter cuts bfloat16 instead of rounding it."""
TILES = Tiles(16, 16, 32, num_warps=1, num_stages=2)
COMPUTE = {"torch": mix_experts_ref, "triton": mix_experts_triton}


class Case:
    """Random experts and tokens; `choice` says how tokens choose."""

    def __init__(
        self,
        tokens: int,
        experts: int,
        per_token: int,
        sizes: tuple[int, int],
        dtype: torch.dtype,
        choice: str = "random",
    ) -> None:
        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape).to(DEVICE, dtype)

        width, inner = sizes
        self.residual, self.x = normal(tokens, width), normal(tokens, width)
        self.gate_up = normal(experts, 2 * inner, width) / width**0.5
        self.down = normal(experts, width, inner) / inner**0.5
        scores = torch.rand(tokens, experts)
        if choice == "one":
            scores[:, experts // 2] = 2
        if choice == "last":
            scores[:, experts - per_token :] += 2
        self.experts = scores.topk(per_token).indices.to(DEVICE)
        self.shares = torch.rand(tokens, per_token).to(DEVICE)

    def arguments(self) -> dict[str, torch.Tensor]:
        return {
            "experts_TA": self.experts,
            "shares_TA": self.shares,
            "gate_up_XWE": self.gate_up,
            "down_XEI": self.down,
        }

    def mixed(self, way: str) -> torch.Tensor:
        residual = self.residual.clone()
        options = {"tiles": TILES} if way == "triton" else {}
        got = COMPUTE[way](residual, self.x, **self.arguments(), **options)
        assert got is residual
        return got

    def wanted(self) -> torch.Tensor:
        """Token by token and expert by expert, in float64."""
        out = self.residual.double()
        for token, (chosen, shares) in enumerate(zip(self.experts, self.shares, strict=True)):
            for expert, share in zip(chosen.tolist(), shares.double(), strict=True):
                gate, up = (self.gate_up[expert].double() @ self.x[token].double()).chunk(2)
                inner = gate / (1 + (-gate).exp()) * up
                out[token] += share * (self.down[expert].double() @ inner)
        return out


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest difference, as a part of the largest value."""
    assert got.shape == want.shape
    return ((got.double() - want).abs().max() / want.abs().max()).item()


ways = pytest.mark.parametrize("way", COMPUTE)


@ways
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("choice", ["random", "one", "last"])
def test_formats(way: str, dtype: torch.dtype, choice: str, seed: int) -> None:
    """`one`: every token has one expert in common; `last`: the other experts stay empty."""
    torch.manual_seed(seed)
    case = Case(19, 4, 2, (24, 18), dtype, choice)
    got = case.mixed(way)
    assert got.dtype is dtype
    assert error(got, case.wanted()) < TOLERANCES[dtype]


@ways
@pytest.mark.parametrize("per_token", [1, 3])
def test_experts_that_others_hold_add_nothing(way: str, per_token: int, seed: int) -> None:
    """The parts of ranks that hold two, one and three of six experts add up to the whole; what
    stands in memory where nobody has written is nobody's."""
    torch.manual_seed(seed)
    case = Case(19, 6, per_token, (24, 18), torch.float32)
    poison = [torch.full((19 * per_token, 24), torch.nan, device=DEVICE) for _ in range(8)]
    del poison
    total = case.residual.clone()
    for start, stop in ((0, 2), (2, 3), (3, 6)):
        share = Case(19, 6, per_token, (24, 18), torch.float32)
        share.residual, share.x, share.shares = torch.zeros_like(total), case.x, case.shares
        share.experts = case.experts - start
        share.gate_up, share.down = case.gate_up[start:stop], case.down[start:stop]
        part = share.mixed(way)
        assert error(case.residual + part, case.wanted()) > TOLERANCES[torch.float32]
        total += part
    assert error(total, case.wanted()) < TOLERANCES[torch.float32]


@ways
@pytest.mark.parametrize("tokens", [1, 17])
@pytest.mark.parametrize("experts", [(1, 1), (5, 1), (9, 3)], ids=str)
@pytest.mark.parametrize("sizes", [(8, 6), (34, 19)], ids=str)
def test_sizes(
    way: str, tokens: int, experts: tuple[int, int], sizes: tuple[int, int], seed: int
) -> None:
    """Widths that fill no block, fewer tokens than experts, one expert alone."""
    torch.manual_seed(seed)
    case = Case(tokens, *experts, sizes, torch.float32)
    assert error(case.mixed(way), case.wanted()) < 1e-5


def test_float64_is_exact(seed: int) -> None:
    torch.manual_seed(seed)
    case = Case(9, 5, 2, (24, 16), torch.float64)
    case.shares = case.shares.double()
    got = mix_experts(case.residual.clone(), case.x, **case.arguments())
    assert error(got, case.wanted()) < 1e-14


@ways
def test_what_must_matter_matters(way: str, seed: int) -> None:
    """Negative control: another expert, share or weight is seen."""
    torch.manual_seed(seed)
    want = Case(6, 4, 2, (16, 16), torch.float32).wanted()
    for name in ("experts", "shares", "gate_up", "down", "x", "residual"):
        torch.manual_seed(seed)
        case = Case(6, 4, 2, (16, 16), torch.float32)
        tensor = getattr(case, name)
        if name == "experts":
            tensor[5] = (tensor[5] + 1) % 4
        else:
            tensor[case.experts[0, 0] if tensor.ndim == 3 else 0] += 0.5
        assert error(case.mixed(way), want) > 1e-3, name


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_rows_do_not_see_each_other(dtype: torch.dtype, seed: int) -> None:
    """Bit for bit: a token's result is the same alone, between others, and when repeated."""
    torch.manual_seed(seed)
    case = Case(30, 3, 2, (16, 16), dtype)
    whole = case.mixed("triton")
    assert torch.equal(case.mixed("triton"), whole)
    alone = Case(1, 3, 2, (16, 16), dtype)
    alone.gate_up, alone.down = case.gate_up, case.down
    for name in ("residual", "x", "experts", "shares"):
        setattr(alone, name, getattr(case, name)[11:12])
    assert torch.equal(alone.mixed("triton")[0], whole[11])


def test_an_empty_experts_weights_are_not_read(seed: int) -> None:
    torch.manual_seed(seed)
    case = Case(20, 6, 2, (32, 16), torch.float32, "last")
    case.gate_up[:4], case.down[:4] = float("nan"), float("nan")
    assert error(case.mixed("triton"), case.wanted()) < 1e-5


def test_rows_may_lie_apart(seed: int) -> None:
    torch.manual_seed(seed)
    case = Case(7, 4, 2, (32, 16), torch.float32)
    wide = torch.randn(7, 80, device=DEVICE)
    wide[:, 8:40], wide[:, 40:72] = case.x, case.residual
    want = case.wanted()
    case.x = wide[:, 8:40]
    mix_experts_triton(wide[:, 40:72], case.x, **case.arguments(), tiles=TILES)
    assert error(wide[:, 40:72], want) < 1e-5


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("per_token", [1, 3])
def test_one_product(gated: bool, per_token: int, seed: int) -> None:
    torch.manual_seed(seed)
    x, weight = torch.randn(10, 30, device=DEVICE), torch.randn(6, 22, 30, device=DEVICE)
    experts = torch.randint(0, 6, (10 * per_token,), device=DEVICE)
    rows = x.repeat_interleave(per_token, dim=0)
    want = (weight[experts].double() @ rows.double().unsqueeze(-1)).squeeze(-1)
    if gated:
        want = torch.nn.functional.silu(want[:, :11]) * want[:, 11:]
    groups = group_rows_triton(experts, 6, TILES.block_m)
    options = {"num_rows": len(experts), "per_token": per_token, "gated": gated, "tiles": TILES}
    assert error(grouped_linear_triton(x, weight, groups, **options), want) < 1e-5
    assert error(grouped_linear_ref(rows, weight, experts, gated=gated), want) < 1e-5


def test_tiles_follow_the_rows_of_an_expert() -> None:
    for gated in (True, False):
        few, many = (choose_tiles(rows, 128, torch.bfloat16, gated=gated) for rows in (64, 32768))
        assert (few.block_m, many.block_m) == (16, 64)
        assert choose_tiles(32768, 128, torch.float32, gated=gated).block_m == 16


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 64, 4096])
def test_chosen_tiles_on_a_device(tokens: int, seed: int) -> None:
    torch.manual_seed(seed)
    case = Case(tokens, 32, 4, (512, 384), torch.bfloat16)
    got = mix_experts(case.residual.clone(), case.x, **case.arguments())
    want = mix_experts_ref(case.residual.double(), case.x.double(), **{
        name: tensor.double() if tensor.is_floating_point() else tensor
        for name, tensor in case.arguments().items()
    })  # fmt: skip
    assert error(got, want) < TOLERANCES[torch.bfloat16]


@pytest.mark.gpu
def test_a_graph_serves_other_choices(seed: int) -> None:
    """Captured once, replayed with other experts: nothing about them was read on the host."""
    torch.manual_seed(seed)
    case = Case(24, 16, 2, (256, 128), torch.bfloat16)
    residual = case.residual.clone()
    mix_experts(residual, case.x, **case.arguments())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mix_experts(residual, case.x, **case.arguments())
    case.experts.copy_(torch.rand(24, 16).topk(2).indices)
    residual.copy_(case.residual)
    graph.replay()
    assert error(residual, case.wanted()) < TOLERANCES[torch.bfloat16]

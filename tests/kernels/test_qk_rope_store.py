"""One launch normalises, rotates and stores what the plain operators do, over shapes of heads and
memory orders of pages.
"""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from engine_service.kernels.qk_rope_store import (
    qk_rope_store,
    qk_rope_store_ref,
    qk_rope_store_triton,
)
from engine_service.kernels.rotary import rotary_angles_ref

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FORMATS = [(torch.float32, 1e-5), (torch.bfloat16, 4e-2), (torch.float16, 5e-3)]
UNTOUCHED = 77.0
NUM_PAGES = 6

ORDERS = {"NGKD": (0, 1, 2, 3), "NKGD": (0, 2, 1, 3), "KNGD": (2, 0, 1, 3)}
"""Memory orders of [N, G, K, D] pages."""


@dataclass
class Case:
    """Random inputs of one call and the memory around them."""

    wide: torch.Tensor
    arguments: dict[str, Any]

    @property
    def width(self) -> int:
        arguments = self.arguments
        _, _, num_kv_heads, head_dim = arguments["k_pages"].shape
        return (arguments["num_heads"] + 2 * num_kv_heads) * head_dim

    def fresh(self) -> dict[str, Any]:
        """The same arguments in memory of their own, rows of qkv apart, the order of pages kept."""
        own = {
            name: value.clone(memory_format=torch.preserve_format)
            if name.endswith("pages")
            else value
            for name, value in self.arguments.items()
        }
        return own | {"qkv_TC": self.wide.clone()[:, : self.width]}


def make_case(
    heads: tuple[int, int],
    head_dim: int,
    dtype: torch.dtype,
    *,
    normed: bool = True,
    order: str = "NGKD",
    page_size: int = 4,
    num_tokens: int = 5,
) -> Case:
    num_heads, num_kv_heads = heads
    size = (NUM_PAGES, page_size, num_kv_heads, head_dim)
    memory = torch.full([size[axis] for axis in ORDERS[order]], UNTOUCHED, dtype=dtype)
    pages = memory.to(DEVICE).permute(*(ORDERS[order].index(axis) for axis in range(4)))
    weight = torch.randn(num_heads + num_kv_heads, head_dim).to(DEVICE, dtype)
    frequencies = 1 / 100 ** torch.linspace(0, 1, head_dim // 2)
    positions = torch.randint(0, 5000, (num_tokens,))
    cos, signed_sin = rotary_angles_ref(positions, frequencies, 1.0, dtype)
    return Case(
        wide=torch.randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim + 8).to(
            DEVICE, dtype
        ),
        arguments={
            "cos_T1D": cos.to(DEVICE),
            "signed_sin_T1D": signed_sin.to(DEVICE),
            "norm_weight": weight if normed else None,
            "eps": 1e-5,
            "k_pages": pages,
            "v_pages": pages.clone(memory_format=torch.preserve_format),
            "slots": torch.randperm(NUM_PAGES * page_size)[:num_tokens].to(DEVICE),
            "num_heads": num_heads,
        },
    )


def check(case: Case, tolerance: float) -> None:
    want, got = case.fresh(), case.fresh()
    got["v_pages"] = got["v_pages"].contiguous()
    kept = got["qkv_TC"].clone()
    want_q = qk_rope_store_ref(**want)
    q = qk_rope_store_triton(**got)
    assert q.shape == want_q.shape
    assert q.data_ptr() == got["qkv_TC"].data_ptr()
    torch.testing.assert_close(q, want_q, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(got["k_pages"], want["k_pages"], rtol=tolerance, atol=tolerance)
    assert torch.equal(got["v_pages"], want["v_pages"])
    assert torch.equal(got["qkv_TC"][:, q[0].numel() :], kept[:, q[0].numel() :])


@pytest.mark.parametrize(("dtype", "tolerance"), FORMATS, ids=str)
@pytest.mark.parametrize("head_dim", [32, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("normed", [True, False])
def test_head_sizes(
    dtype: torch.dtype, tolerance: float, head_dim: int, normed: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    check(make_case((6, 2), head_dim, dtype, normed=normed), tolerance)


@pytest.mark.parametrize("heads", [(1, 1), (14, 2), (28, 4), (32, 8), (16, 16)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_numbers_of_heads(heads: tuple[int, int], head_dim: int, seed: int) -> None:
    torch.manual_seed(seed)
    check(make_case(heads, head_dim, torch.float32, num_tokens=2), 1e-5)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("page_size", [1, 5, 16])
def test_memory_orders_of_pages(order: str, page_size: int, seed: int) -> None:
    torch.manual_seed(seed)
    check(make_case((4, 2), 32, torch.float32, order=order, page_size=page_size), 1e-5)


def test_what_must_matter_matters(seed: int) -> None:
    """Angles, weights, epsilon and slots: with others the result differs."""
    torch.manual_seed(seed)
    case = make_case((4, 2), 32, torch.float32)
    want, got = case.fresh(), {}
    want_q = qk_rope_store_ref(**want)
    for name, change in {
        "cos_T1D": lambda cos: cos * 0.9,
        "signed_sin_T1D": lambda sin: -sin,
        "norm_weight": lambda weight: weight.roll(1, dims=0),
        "eps": lambda eps: 0.3,
    }.items():
        other = case.fresh()
        other[name] = change(other[name])
        got[name] = qk_rope_store_triton(**other)
        assert not torch.allclose(got[name], want_q, atol=1e-3), name
        assert not torch.allclose(other["k_pages"], want["k_pages"], atol=1e-3), name
    other = case.fresh()
    other["slots"] = other["slots"].roll(1)
    qk_rope_store_triton(**other)
    assert not torch.allclose(other["v_pages"], want["v_pages"], atol=1e-3)


def test_the_rotation_is_rounded_once(seed: int) -> None:
    """Half formats: the exact rotation's nearest neighbour, up to ties of float32."""
    torch.manual_seed(seed)
    case = make_case((8, 2), 64, torch.float16, normed=False)
    qkv, cos, sin = (
        tensor.double()
        for tensor in (
            case.wide[:, : 8 * 64].view(-1, 8, 64),
            case.arguments["cos_T1D"],
            case.arguments["signed_sin_T1D"],
        )
    )
    want = (qkv * cos + qkv.roll(32, dims=-1) * sin).half()
    assert (qk_rope_store_triton(**case.fresh()) == want).float().mean() > 0.99
    assert (qk_rope_store_ref(**case.fresh()) == want).float().mean() < 0.99


def test_the_norm_is_rounded_before_its_weight(seed: int) -> None:
    """Weights of powers of two would hide it, so weights are what they are; angles are zero."""
    torch.manual_seed(seed)
    case = make_case((8, 2), 64, torch.float16)
    still = case.fresh()
    still["cos_T1D"] = torch.ones_like(still["cos_T1D"])
    still["signed_sin_T1D"] = torch.zeros_like(still["signed_sin_T1D"])
    want = qk_rope_store_ref(**still).clone()
    x = case.wide[:, : 8 * 64].float().view(-1, 8, 64)
    scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
    once = (x * scale * still["norm_weight"][:8].float()).half()
    assert (qk_rope_store_triton(**still) == want).float().mean() > 0.99
    assert (once == want).float().mean() < 0.9


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_public_operator(dtype: torch.dtype, seed: int) -> None:
    torch.manual_seed(seed)
    case = make_case((4, 2), 32, dtype)
    want, got = case.fresh(), case.fresh()
    torch.testing.assert_close(
        qk_rope_store(**got), qk_rope_store_ref(**want), rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(got["k_pages"], want["k_pages"], rtol=1e-5, atol=1e-5)
    assert (got["k_pages"] == UNTOUCHED).any()

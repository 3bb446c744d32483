"""Angles and rotation equal their formulas, over number formats, head sizes and far positions."""

import pytest
import torch

from engine_service.kernels.rotary import (
    rotary_angles,
    rotary_angles_ref,
    rotary_angles_triton,
    rotate,
    rotate_ref,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FORMATS = [(torch.float32, 1e-6), (torch.bfloat16, 1e-2), (torch.float16, 1e-3)]


def close(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> None:
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def frequencies(head_dim: int) -> torch.Tensor:
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    return (1.0 / 10000.0**exponent).to(DEVICE)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        (torch.float64, 1e-12),
        (torch.float32, 1e-5),
        (torch.bfloat16, 4e-2),
        (torch.float16, 4e-3),
    ],
    ids=str,
)
@pytest.mark.parametrize("head_dim", [2, 10, 64])
def test_rotate(dtype: torch.dtype, tolerance: float, head_dim: int, seed: int) -> None:
    torch.manual_seed(seed)
    x = torch.randn(6, 3, head_dim).to(dtype)
    angles = torch.randn(6, head_dim // 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    want = rotate_ref(x, torch.cat((cos, cos), -1), torch.cat((sin, sin), -1))
    tables = torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None]
    close(rotate(x, *tables), want, tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), FORMATS, ids=str)
@pytest.mark.parametrize("head_dim", [2, 32, 80, 128])
@pytest.mark.parametrize("factor", [1.0, 1.2079])
def test_rotary_angles(
    dtype: torch.dtype, tolerance: float, head_dim: int, factor: float, seed: int
) -> None:
    torch.manual_seed(seed)
    positions = torch.randint(0, 1 << 17, (5,)).to(DEVICE)
    want = rotary_angles_ref(positions, frequencies(head_dim), factor, dtype)
    for compute in (rotary_angles, rotary_angles_triton):
        for got, table in zip(
            compute(positions, frequencies(head_dim), factor, dtype), want, strict=True
        ):
            assert got.shape == (5, 1, head_dim)
            close(got, table, tolerance)
    cos, _ = rotary_angles_triton(positions + 1, frequencies(head_dim), factor, dtype)
    assert not torch.allclose(cos, want[0], atol=0.05)


@pytest.mark.parametrize("last", [0, 4095, 1_000_000, 16_000_000])
def test_far_positions_are_exact(last: int) -> None:
    """Cosines of angles of a million radians: without range reduction they are noise."""
    positions = torch.tensor([last], device=DEVICE)
    angle = (positions.float()[:, None, None] * frequencies(64)).double()
    cos, signed_sin = rotary_angles_triton(positions, frequencies(64), 1.0, torch.float32)
    close(cos.double(), torch.cat((angle, angle), -1).cos(), 3e-7)
    close(signed_sin.double(), torch.cat((-angle, angle), -1).sin(), 3e-7)

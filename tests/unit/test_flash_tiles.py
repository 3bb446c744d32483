"""FlashAttention 4 over pages that are key tiles of its own: which they are, and what is behind the
last key there."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from engine_service.attention import flash
from engine_service.attention.base import AttentionShape
from engine_service.attention.flash import FlashBackend, load_flash4, page_tile
from engine_service.attention.reference import ReferenceBackend
from tests.models.paged import PageTable, attend_steps, causal
from tests.unit.flash_libraries import stand_in, varlen4, whole4


def shape_of(page_size: int) -> AttentionShape:
    return AttentionShape(
        num_heads=4, num_kv_heads=2, head_dim=8, page_size=page_size, dtype=torch.float64
    )


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize(("page_size", "tile"), [(64, (192, 64)), (64, None), (128, None)])
def test_pages_that_are_loaded_whole_end_with_zeros(
    page_size: int,
    tile: tuple[int, int] | None,
    window: int | None,
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
) -> None:
    """Values behind a span's last key are read there, and what a former owner left may be NaN."""
    monkeypatch.setattr(flash, "_tile_there", lambda *_: tile)
    made = {"flash_attn_varlen_func": whole4, "interface": SimpleNamespace(_flash_attn_fwd=whole4)}
    call = stand_in(monkeypatch, load_flash4, "flash_attn.cute", **made)
    table = PageTable(2, 200, page_size, seed)
    shape = shape_of(page_size)
    steps = [[causal(0, 0, 70), causal(1, 0, 64)], [causal(0, 70, 200), causal(1, 64, 65)]]

    def outputs() -> list[torch.Tensor]:
        return attend_steps(
            FlashBackend(shape, call, ReferenceBackend(shape)), table, steps, window
        )

    want = attend_steps(ReferenceBackend(shape), table, steps, window)
    for left, right in zip(outputs(), want, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-9)
    monkeypatch.setattr(flash, "clear_page_ends", lambda *_: None)
    is_whole = tile is not None or page_size == 128
    assert outputs()[0].isnan().any() == is_whole, "the control"


@pytest.mark.parametrize(
    ("capability", "page_size", "head_dim", "tile"),
    [
        ((9, 0), 64, 128, (192, 64)),
        ((9, 0), 64, 64, None),
        ((9, 0), 64, 112, None),
        ((9, 0), 64, 192, None),
        ((9, 0), 128, 128, None),
        ((9, 0), 16, 128, None),
        ((10, 0), 64, 128, None),
    ],
)
def test_tiles_of_one_page(
    capability: tuple[int, int], page_size: int, head_dim: int, tile: tuple[int, int] | None
) -> None:
    assert page_tile(capability, page_size, head_dim) == tile


@pytest.mark.parametrize("interface", [SimpleNamespace(), SimpleNamespace(_flash_attn_fwd=varlen4)])
def test_a_release_without_a_say_in_tiles_chooses_its_own(
    interface: object, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(flash, "_tile_there", lambda *_: (192, 64))
    made = {"flash_attn_varlen_func": varlen4, "interface": interface}
    call = stand_in(monkeypatch, load_flash4, "flash_attn.cute", **made)
    table, shape, steps = PageTable(1, 200, 64, seed), shape_of(64), [[causal(0, 0, 70)]]
    got = attend_steps(FlashBackend(shape, call, ReferenceBackend(shape)), table, steps, None)
    want = attend_steps(ReferenceBackend(shape), table, steps, None)
    torch.testing.assert_close(got[0], want[0], rtol=1e-9, atol=1e-9)

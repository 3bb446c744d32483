"""Which tiles a gated product takes, and what happens where its kernel is not there or fails; its
numbers are compared on a GPU (tests/gpu/test_gated_product.py)."""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from engine_service.kernels import gated_product as gated
from engine_service.kernels.activation import silu_mul_ref
from engine_service.kernels.gated_product import TILES, GatedTile, choose_tile, gated_product

H100 = 132


class OnHopper(torch.Tensor):
    """A CPU tensor that says it is on a device of which this kernel is."""

    is_cuda = True


class Library:
    """In place of QuACK: fails where it is told to."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.fails: Exception | None = None
        self.is_wrong = False

    def gemm_gated(self, x: torch.Tensor, weight_KN: torch.Tensor, **how: Any) -> None:
        self.calls.append(how)
        if self.fails:
            raise self.fails
        y = x.as_subclass(torch.Tensor) @ weight_KN
        how["postact_out"].copy_(silu_mul_ref(y.roll(y.shape[1] // 2, 1) if self.is_wrong else y))


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    library = Library()
    for name, held in (
        ("quack", {}),
        ("quack.gemm_config", {"GemmConfig": SimpleNamespace}),
        ("quack.gemm_interface", {"gemm_gated": library.gemm_gated}),
    ):
        module = ModuleType(name)
        vars(module).update(held)
        monkeypatch.setitem(sys.modules, name, module)
    properties = SimpleNamespace(multi_processor_count=H100)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    gated.open_quack.cache_clear()
    yield library
    gated.open_quack.cache_clear()


def drawn(seed: int, rows: int = 128, outputs: int = 24576) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    x, weight = torch.randn(rows, 8).bfloat16(), torch.randn(outputs, 8).bfloat16()
    return x.as_subclass(OnHopper), weight


@pytest.mark.parametrize(
    ("rows", "outputs", "tile"),
    [
        (16, 24576, None),
        (24, 24576, (64, 192, 1, 1)),
        (64, 24576, (64, 192, 1, 1)),
        (80, 24576, None),
        (96, 24576, (128, 192, 1, 2)),
        (128, 24576, (128, 192, 1, 2)),
        (256, 24576, (128, 192, 2, 1)),
        (384, 24576, (128, 192, 1, 2)),
        (512, 24576, (128, 192, 2, 1)),
        (768, 24576, (128, 160, 2, 1)),
        (1024, 24576, (256, 192, 2, 1)),
        (2048, 24576, (256, 192, 2, 1)),
        (4096, 24576, (256, 192, 2, 1)),
        (8192, 24576, (256, 192, 2, 1)),
        (12288, 24576, (256, 192, 2, 1)),
        (1024, 12288, (256, 192, 2, 1)),
        (8192, 12288, (256, 192, 2, 1)),
        (32, 12288, (64, 96, 1, 1)),
        (96, 12288, (64, 192, 2, 1)),
        (128, 12288, (64, 192, 2, 1)),
        (64, 12800, None),
        (128, 12800, (128, 128, 1, 2)),
        (64, 25600, (64, 224, 1, 1)),
        (128, 25600, (128, 224, 1, 2)),
        (256, 12800, (128, 224, 2, 1)),
        (384, 12800, None),
        (512, 12800, (128, 224, 2, 1)),
        (1024, 12800, (128, 160, 2, 1)),
        (2048, 12800, (256, 160, 2, 1)),
        (8192, 12800, (128, 192, 2, 1)),
        (1024, 25600, (256, 160, 2, 1)),
        (2048, 25600, (256, 160, 2, 1)),
        (4096, 25600, (128, 192, 2, 1)),
        (8192, 25600, (256, 192, 2, 1)),
        (64, 51200, (64, 224, 1, 1)),
        (128, 51200, (128, 224, 1, 2)),
        (128, 6144, None),
    ],
)
def test_the_measured_table(
    rows: int, outputs: int, tile: tuple[int, int, int, int] | None
) -> None:
    """docs/performance.md, "The gate inside of its product": rows and outputs of a tile, and its
    cluster."""
    found = choose_tile(rows, outputs, H100)
    assert (None if found is None else (*found[:2], *found.cluster)) == tile


def test_a_tile_fills_the_device_and_none_takes_fewer_waves(seed: int) -> None:
    rng = random.Random(seed)
    chosen = 0

    def waves_of(tile: GatedTile) -> int:
        """By counting clusters that have something to compute."""
        high, wide = (each * by for each, by in zip(tile[:2], tile.cluster, strict=True))
        clusters = len(range(0, rows, high)) * len(range(0, outputs, wide))
        at_once = H100 // (tile.cluster[0] * tile.cluster[1])
        return len(range(0, clusters, at_once))

    for _ in range(2000):
        rows, outputs = rng.randrange(1, 9000), 16 * rng.randrange(8, 3000)
        tile = choose_tile(rows, outputs, H100)
        if tile is None:
            continue
        chosen += 1
        assert 24 <= rows <= 64 or rows >= 96
        full = 64 if rows <= 64 else max(rows, 128)  # a tile is computed whole
        computed = waves_of(tile) * H100 * tile.rows * tile.outputs
        assert full * outputs / computed >= (0.7 if full == 128 else 0.8)
        alike = [one for one in TILES if one[:2] == tile[:2] and rows <= gated.MANY_ROWS]
        if rows > 128:
            assert waves_of(tile) == min(map(waves_of, alike), default=waves_of(tile))
    assert 500 < chosen < 2000


def test_what_suits_it_is_written_where_it_is_wanted(library: Library, seed: int) -> None:
    x, weight = drawn(seed)
    want = silu_mul_ref(x.as_subclass(torch.Tensor) @ weight.t())
    out = torch.empty(128, 12288, dtype=torch.bfloat16)
    assert gated_product(x, weight, out) is out
    assert torch.equal(out, want)
    own = gated_product(x, weight)
    assert own is not None
    assert torch.equal(own.as_subclass(torch.Tensor), want)
    assert len(library.calls) == len(TILES) + 2, "each tile is tried once, on products of its own"
    for how in library.calls[-2:]:
        assert (how["config"].tile_m, how["config"].tile_n) == (128, 192)
        assert how["activation"] == "swiglu"
        assert how["concat_layout"] == ("B",), "gate and up lie behind each other"
        assert how["store_preact"] is False


def test_what_does_not_suit_it_is_the_librarys(library: Library) -> None:
    x, weight = drawn(0)
    plain = x.as_subclass(torch.Tensor)
    assert gated_product(plain, weight) is None
    assert gated_product(x[:95], weight) is None
    assert gated_product(x.float(), weight.float()) is None
    assert gated_product(x, weight.half()) is None
    assert gated_product(x.t().contiguous().t(), weight) is None
    assert gated_product(x[:, :7].contiguous(), weight[:, :7].contiguous()) is None
    assert gated_product(x, weight, torch.empty(128, 24576, dtype=x.dtype)[:, ::2]) is None
    assert gated_product(x, weight, torch.empty(127, 12288, dtype=x.dtype)) is None, "other rows"
    assert gated_product(torch.cat([x, x], 1), weight) is None
    assert not library.calls


@pytest.mark.parametrize(
    ("flaw", "how", "told"),
    [
        ("fails", TypeError("no such\nargument"), "TypeError: no such argument"),
        ("is_wrong", True, "wrong numbers"),
    ],
)
def test_what_fails_or_is_wrong_is_told_once_and_not_tried_again(
    library: Library, caplog: pytest.LogCaptureFixture, flaw: str, how: object, told: str
) -> None:
    x, weight = drawn(0)
    setattr(library, flaw, how)
    with caplog.at_level(logging.WARNING, "tidemill.rank"):
        assert gated_product(x, weight) is None
        assert gated_product(x, weight) is None
    assert len(library.calls) == len(TILES)
    said = [record.getMessage() for record in caplog.records]
    assert "off for tiles of 128 x 192 in clusters of 2 x 1," in said[0]
    assert all(told in line for line in said)
    assert all(sum(str(tile) in line for line in said) == 1 for tile in TILES)
    assert len(said) == (1 if flaw == "fails" else len(set(said)))
    setattr(library, flaw, None)
    assert gated_product(x, weight) is None


def test_a_tile_that_fails_later_is_the_librarys_from_then_on(library: Library) -> None:
    x, weight = drawn(0)
    assert gated_product(x, weight) is not None
    library.fails = TypeError()
    assert gated_product(x, weight) is None
    library.fails = None
    assert gated_product(x, weight) is None
    assert gated_product(*drawn(0, 256, 12800)) is not None, "other tiles still work"


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("full"), RuntimeError("CUDA error: out of memory")]
)
def test_memory_that_runs_out_is_not_its_fault(
    error: Exception, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight = drawn(0)
    assert gated_product(x, weight) is not None
    with monkeypatch.context() as full:
        full.setattr(library, "fails", error)
        with pytest.raises(type(error)):
            gated_product(x, weight)
    assert gated_product(x, weight) is not None


def test_nothing_is_tried_while_a_graph_is_captured(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compilers and comparisons have no place there; what was tried before is taken."""
    x, weight = drawn(0)
    with monkeypatch.context() as capture:
        capture.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert gated_product(x, weight) is None
        assert not library.calls
    assert gated_product(x, weight) is not None
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert gated_product(x, weight) is not None


def test_without_it_the_library_multiplies(
    library: Library, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    x, weight = drawn(0)
    for name in ("quack", "quack.gemm_config", "quack.gemm_interface"):
        monkeypatch.delitem(sys.modules, name)
    assert gated_product(x, weight) is None
    gated.open_quack.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    assert gated_product(x, weight) is None
    assert not library.calls
    assert not caplog.records


def test_one_that_does_not_load_is_told_once(
    library: Library, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def other_version(**named: object) -> None:
        raise TypeError("unexpected keyword argument 'device_capacity'")

    x, weight = drawn(0)
    monkeypatch.setattr(sys.modules["quack.gemm_config"], "GemmConfig", other_version)
    for _ in range(2):
        assert gated_product(x, weight) is None
    (record,) = caplog.records
    assert "does not load" in record.getMessage()
    assert "device_capacity" in record.getMessage()
    assert not library.calls

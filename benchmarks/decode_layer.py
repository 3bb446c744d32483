"""What each launch of a decoding layer costs where it stands: the layer with some of its launches
left out or made twice, all layers of a model in one CUDA graph.

    python -m benchmarks.decode_layer [--shape qwen3-8b] [--rows 1] [--context 256]

A kernel timed behind itself finds its inputs and the memory as it left them; here it stands between
the others, which stream hundreds of megabytes of weights by. Random weights, bfloat16.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch

from engine_service.kernels.paged_decode import (
    count_splits,
    new_parts,
    paged_decode_triton,
    short_tiles,
)
from engine_service.kernels.paged_tiles import Spans
from engine_service.kernels.qk_rope_store import qk_rope_store
from engine_service.schemes.unquantized import Unquantized

_EPS, _PAGE, _REPLAYS = 1e-6, 64, 9


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a dense decoder."""

    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int = 128


SHAPES = {
    "qwen3-8b": Shape(36, 4096, 12288, 32, 8),
    "qwen3-32b": Shape(64, 5120, 25600, 64, 8),
    "qwen3-0.6b": Shape(28, 1024, 3072, 16, 8),
}
VARIANTS = {
    "whole": (1, 1),
    "no attention": (1, 0),
    "no rotation": (0, 1),
    "neither": (0, 0),
    "attention twice": (1, 2),
    "rotation twice": (2, 1),
}
"""How often rotation (with norms and the KV store) and attention are launched."""


class Layer:
    """One layer's weights and pages."""

    def __init__(self, shape: Shape, num_pages: int, device: torch.device) -> None:
        def weight(out_size: int, in_size: int) -> dict[str, torch.Tensor]:
            return {"weight": _random(out_size, in_size, device)}

        width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        self.qkv = weight(width, shape.hidden)
        self.out = weight(shape.hidden, shape.heads * shape.head_dim)
        self.gate_up = weight(2 * shape.inner, shape.hidden)
        self.down = weight(shape.hidden, shape.inner)
        self.norm = _random(1, shape.hidden, device)[0]
        self.head_norm = _random(shape.heads + shape.kv_heads, shape.head_dim, device)
        rows = num_pages * shape.kv_heads * _PAGE
        self.k, self.v = (
            _random(rows, shape.head_dim, device)
            .view(num_pages, shape.kv_heads, _PAGE, shape.head_dim)
            .transpose(1, 2)
            for _ in "kv"
        )


class Decoder:
    """All layers, and one step of `rows` requests that have `context` keys each."""

    def __init__(self, shape: Shape, rows: int, context: int, device: torch.device) -> None:
        self._shape, self._rows = shape, rows
        per_row = -(-context // _PAGE)
        self._layers = [Layer(shape, rows * per_row, device) for _ in range(shape.layers)]
        table = torch.randperm(rows * per_row, device=device).int().view(rows, per_row)
        self._slots = table[:, -1].long() * _PAGE + (context - 1) % _PAGE
        one = torch.ones(rows, dtype=torch.int32, device=device)
        self._spans = Spans(
            torch.arange(rows + 1, dtype=torch.int32, device=device),
            one.long() * (context - 1),
            one * context,
            one,
            table,
        )
        cos = torch.ones(rows, 1, shape.head_dim, dtype=torch.bfloat16, device=device)
        self._angles = (cos, torch.zeros_like(cos))
        self._residual = _random(rows, shape.hidden, device)
        self._tiles = short_tiles(16, shape.head_dim, torch.bfloat16, rows * shape.kv_heads)
        num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        num_splits = count_splits(rows, shape.kv_heads, context, block_m=16, num_sms=num_sms)
        self._parts = None
        if num_splits > 1:
            size = (rows, shape.kv_heads, num_splits)
            self._parts = new_parts(*size, self._tiles.block_m, shape.head_dim, device)

    def step(self, rotations: int, attentions: int) -> None:
        """Every launch of every layer, as the engine makes them."""
        products, x = Unquantized(), self._residual
        for layer in self._layers:
            norm = (layer.norm, _EPS)
            qkv = products.apply(x, layer.qkv, norm=norm)
            for _ in range(rotations):
                self._rotate(layer, qkv)
            for _ in range(attentions):
                mixed = self._attend(layer, qkv)
            if not attentions:
                mixed = qkv[:, : self._shape.heads * self._shape.head_dim].contiguous()
            products.add(x, mixed, layer.out)
            products.add(x, products.apply(x, layer.gate_up, norm=norm, gated=True), layer.down)

    def _rotate(self, layer: Layer, qkv: torch.Tensor) -> None:
        qk_rope_store(
            qkv,
            *self._angles,
            norm_weight=layer.head_norm,
            eps=_EPS,
            k_pages=layer.k,
            v_pages=layer.v,
            slots=self._slots,
            num_heads=self._shape.heads,
        )

    def _attend(self, layer: Layer, qkv: torch.Tensor) -> torch.Tensor:
        queries = qkv.view(self._rows, -1, self._shape.head_dim)[:, : self._shape.heads]
        mixed = paged_decode_triton(
            queries,
            layer.k,
            layer.v,
            self._spans,
            scale=self._shape.head_dim**-0.5,
            window=None,
            tiles=self._tiles,
            parts=self._parts,
            one_query=True,
        )
        return mixed.flatten(1)


def _random(rows: int, columns: int, device: torch.device) -> torch.Tensor:
    return torch.randn(rows, columns, dtype=torch.bfloat16, device=device) * 0.02


def time_us(step: Callable[[], None]) -> float:
    """Median microseconds of a replay."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())  # which may still fill weights and tables
    with torch.cuda.stream(side):
        step()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    graph.replay()
    times = []
    for _ in range(_REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000)
    return median(times)


@torch.inference_mode()
def main(argv: Sequence[str] | None = None) -> None:
    """Prints microseconds a layer for every variant."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decode_layer")
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--context", type=int, default=256)
    said = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.exit(2, "benchmarks.decode_layer needs a CUDA device\n")
    shape = SHAPES[said.shape]
    decoder = Decoder(shape, said.rows, said.context, torch.device("cuda"))
    for name, (rotations, attentions) in VARIANTS.items():
        us = time_us(partial(decoder.step, rotations, attentions)) / shape.layers
        print(f"{name:16s} {us:8.2f} us a layer")


if __name__ == "__main__":
    main()

"""Attention of decoding rows by how the kernel is cut, over the keys that whole request sets have.

    python -m benchmarks.decode_cuts [--heads 16] [--kv-heads 8] [--json FILE]

Microseconds of a layer in a CUDA graph, medians, and TB/s of keys and values; heads of 128,
bfloat16, pages of 64 that lie anywhere. `mixed256@400` are the rows of that set that still
decode at step 400, longest first as a batch has them; `256x1088` are equal ones. Every cut must
give what the first one gives.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.decode_layer import time_us
from engine_service.kernels.paged_decode import (
    count_splits,
    new_parts,
    paged_decode_triton,
    short_tiles,
)
from engine_service.kernels.paged_tiles import Spans, Tiles
from tidemill.bench.sets import request_sets

_HEAD_DIM, _PAGE, _ROWS = 128, 64, 16
_CACHED, _MOST_LAYERS = 1 << 28, 64
"""Bytes that layers of a graph read together at least, so that no cache holds them."""
_CASES = (
    "mixed256@1,mixed256@200,mixed256@400,mixed256@600,mixed256@750,mixed256@900,mixed256@1000,"
    "256x1088,128x256,128x384,64x4096,32x256,32x384,8x16384,1x256,1x384"
)


class Case(NamedTuple):
    """Rows on the device, and the layers' queries and pages."""

    keys: list[int]
    spans: Spans
    q: torch.Tensor
    layers: list[tuple[torch.Tensor, torch.Tensor]]

    @property
    def kv_heads(self) -> int:
        return self.layers[0][0].shape[2]


def keys_of(name: str) -> list[int]:
    """Longest first."""
    of_set, at, step = name.partition("@")
    if not at:
        rows, _, keys = name.partition("x")
        return [int(keys)] * int(rows)
    (requests,) = request_sets(of_set)
    pairs = zip(requests.prompts, requests.output_lens, strict=True)
    return sorted((len(p) + int(step) for p, out in pairs if out > int(step)), reverse=True)


def bytes_of(keys: list[int], kv_heads: int) -> int:
    """Of keys and values of a layer."""
    return sum(keys) * 2 * kv_heads * _HEAD_DIM * torch.bfloat16.itemsize


def make_case(keys: list[int], heads: int, kv_heads: int, device: torch.device) -> Case:
    width, rows = -(-max(keys) // _PAGE), len(keys)
    pages = [-(-count // _PAGE) for count in keys]
    order = torch.randperm(sum(pages)).to(torch.int32)
    table = torch.zeros(rows, width, dtype=torch.int32)
    for row, own in enumerate(order.split(pages)):
        table[row, : len(own)] = own
    kv_lens = torch.tensor(keys, dtype=torch.int32, device=device)
    spans = Spans(
        cu_seqlens_q=torch.arange(rows + 1, dtype=torch.int32, device=device),
        positions=kv_lens.long() - 1,
        kv_lens=kv_lens,
        mask_block=torch.ones_like(kv_lens),
        page_table=table.to(device),
    )
    num_layers = min(_MOST_LAYERS, max(4, -(-_CACHED // bytes_of(keys, kv_heads))))
    size = (num_layers, 2, sum(pages), kv_heads, _PAGE, _HEAD_DIM)
    pool = torch.empty(size, dtype=torch.bfloat16, device=device).normal_()
    layers = [(k.transpose(1, 2), v.transpose(1, 2)) for k, v in pool]
    q = torch.randn(rows, heads, _HEAD_DIM, device=device).bfloat16()
    return Case(keys, spans, q, layers)


def cuts(case: Case, num_sms: int) -> dict[str, tuple[Tiles, int]]:
    """Tiles and splits by name; the engine's own is the first."""
    programs, longest = len(case.keys) * case.kv_heads, case.keys[0]
    own = short_tiles(_ROWS, _HEAD_DIM, torch.bfloat16, programs, longest)
    splits = count_splits(len(case.keys), case.kv_heads, longest, block_m=_ROWS, num_sms=num_sms)
    # With 168 registers three programs of four warps run at once and nothing is spilled.
    apart = Tiles(_ROWS, 64, 4, 3, apart=True, registers=168)
    crowded = replace(apart, num_stages=2, registers=128)
    tiles = {
        "own": own,
        "own, span first": replace(own, span_first=True),
        "64 keys, 4 warps": Tiles(_ROWS, 64, 4, 3),
        "64 keys, 4 warps, 2 stages": Tiles(_ROWS, 64, 4, 2, registers=128),
        "apart": apart,
        "apart, span first": replace(apart, span_first=True),
        "apart, 4 stages": replace(apart, num_stages=4),
        "apart, 2 stages": crowded,
        "apart, 2 stages, span first": replace(crowded, span_first=True),
    }
    if case.q.shape[1] // case.kv_heads <= 8:
        tiles["apart, 8 rows"] = replace(apart, block_m=8)
        tiles["apart, 8 rows, 2 stages"] = replace(crowded, block_m=8)
    found = {name: (one, splits) for name, one in tiles.items()}
    for name in ("own", "apart", "apart, 2 stages"):
        for more in (2, 4):
            many = min(16, splits * more, longest // 256)
            if many > splits:
                found[f"{name}, more splits ({many})"] = (found[name][0], many)
    return found


def run_layers(call: Callable[[int], torch.Tensor], num_layers: int) -> None:
    for layer in range(num_layers):
        call(layer)


def layer_call(case: Case, tiles: Tiles, splits: int) -> Callable[[int], torch.Tensor]:
    """What layer i launches."""
    parts = None
    if splits > 1:
        size = (len(case.keys), case.kv_heads, splits, tiles.block_m, _HEAD_DIM)
        parts = new_parts(*size, case.q.device)

    def call(layer: int) -> torch.Tensor:
        return paged_decode_triton(
            case.q,
            *case.layers[layer],
            case.spans,
            scale=_HEAD_DIM**-0.5,
            window=None,
            tiles=tiles,
            parts=parts,
            one_query=True,
        )

    return call


def measure(name: str, heads: int, kv_heads: int, device: torch.device) -> dict[str, Any]:
    case = make_case(keys_of(name), heads, kv_heads, device)
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    want: torch.Tensor | None = None
    figures: dict[str, Any] = {}
    for cut, (tiles, splits) in cuts(case, num_sms).items():
        call = layer_call(case, tiles, splits)
        got = call(0)
        want = got if want is None else want
        off = float((got - want).abs().max() / want.abs().max())
        assert off < 1e-2, f"{name}, {cut}: differs by {off}"
        took = time_us(partial(run_layers, call, len(case.layers))) / len(case.layers)
        figures[cut] = {"us": round(took, 2), "splits": splits}
        speed = bytes_of(case.keys, kv_heads) / took / 1e6
        print(f"{name:14} {cut:32} {splits:3} splits {took:9.2f} us {speed:6.2f} TB/s", flush=True)
    return {"rows": len(case.keys), "keys": sum(case.keys), "cuts": figures}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--cases", default=_CASES)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    device = torch.device("cuda", torch.cuda.current_device())
    gpu = torch.cuda.get_device_name(device)
    heads, kv_heads = options.heads, options.kv_heads
    print(f"{gpu}, {heads} heads over {kv_heads}")
    names = options.cases.split(",")
    found = {name: measure(name, heads, kv_heads, device) for name in names}
    if options.json:
        figures = {"gpu": gpu, "heads": heads, "kv_heads": kv_heads, "cases": found}
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""FlashAttention 4 over our pages: with the tile that it chooses, which fetches pages of 64 slot by
slot, with tiles whose keys are one page, and over pages of 128, which are its own tiles.

    python -m benchmarks.flash_tiles [--heads 32] [--prompts 8x1024,4x2048,1x8192,1x8192@16384]

`NxQ@K` are N prompts of Q queries over K keys. Microseconds of a layer, medians, and TFLOP/s; 8
key-value heads of 128, bfloat16, causal. Clearing the ends of pages is part of it.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import NamedTuple

import torch

from benchmarks.mixed_attention import measure
from engine_service.attention.flash import load_flash4
from engine_service.kernels.page_ends import clear_page_ends

_KV_HEADS, _HEAD_DIM = 8, 128
_TILES = (None, (128, 64), (192, 64), (64, 64))


class Prompts(NamedTuple):
    """Equal prompts over scattered pages."""

    number: int
    queries: int
    keys: int

    def flops(self, heads: int) -> float:
        seen = self.queries * (self.keys - self.queries) + self.queries * (self.queries + 1) / 2
        return 4 * heads * _HEAD_DIM * seen * self.number


class Case(NamedTuple):
    """What a layer has of them on the device."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cu_seqlens_q: torch.Tensor
    kv_lens: torch.Tensor
    page_table: torch.Tensor


def read_prompts(text: str) -> Prompts:
    count, _, rest = text.partition("x")
    queries, _, keys = rest.partition("@")
    return Prompts(int(count), int(queries), int(keys or queries))


def make_case(prompts: Prompts, heads: int, page_size: int, device: torch.device) -> Case:
    width = -(-prompts.keys // page_size)
    order = torch.randperm(prompts.number * width, device=device).to(torch.int32)
    numbers = torch.arange(prompts.number + 1, dtype=torch.int32, device=device)
    k, v = torch.randn(2, len(order), page_size, _KV_HEADS, _HEAD_DIM, device=device).bfloat16()
    return Case(
        q=torch.randn(prompts.number * prompts.queries, heads, _HEAD_DIM, device=device).bfloat16(),
        k=k,
        v=v,
        cu_seqlens_q=numbers * prompts.queries,
        kv_lens=torch.full_like(numbers[1:], prompts.keys),
        page_table=order.view(prompts.number, width),
    )


def run(case: Case, tile: tuple[int, int] | None) -> torch.Tensor:
    from flash_attn.cute import interface

    if tile is not None:
        clear_page_ends(case.v, case.page_table, case.kv_lens)
    out: torch.Tensor = interface._flash_attn_fwd(
        case.q,
        case.k,
        case.v,
        cu_seqlens_q=case.cu_seqlens_q,
        seqused_k=case.kv_lens,
        page_table=case.page_table,
        softmax_scale=_HEAD_DIM**-0.5,
        causal=True,
        tile_mn=tile,
    )[0]
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--prompts", default="8x1024,4x2048,1x8192,1x8192@16384")
    options = parser.parse_args()
    load_flash4()  # which says where its kernels are kept
    device = torch.device("cuda", torch.cuda.current_device())
    print(f"{torch.cuda.get_device_name(device)}, {options.heads} heads")
    for text in options.prompts.split(","):
        prompts = read_prompts(text)
        for page_size, tiles in ((64, _TILES), (128, (None,))):
            case = make_case(prompts, options.heads, page_size, device)
            own = run(case, None)
            for tile in tiles:
                off = float((run(case, tile) - own).abs().max() / own.abs().max())
                assert off < 1e-2, f"they differ by {off}"
                took = measure(partial(run, case, tile))
                speed = prompts.flops(options.heads) / took / 1e6
                named = "its own tile" if tile is None else f"{tile[0]} x {tile[1]}"
                print(f"{text:14} pages of {page_size:3} {named:12} {took:8.1f} us {speed:6.0f}")


if __name__ == "__main__":
    main()

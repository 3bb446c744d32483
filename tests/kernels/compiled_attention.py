"""Attention of few queries as an 8B model launches it, split, by rows of a tile. It needs
`tests.kernels.compiling` as its plugin, and is not collected otherwise."""

from __future__ import annotations

import pytest
import torch

from engine_service.kernels import paged_decode
from engine_service.kernels.paged_tiles import Spans
from tests.kernels import compiling

HEADS, KV_HEADS, HEAD_DIM, PAGE = 32, 8, 128, 64


@pytest.mark.parametrize("rows", sorted(paged_decode._PROGRAMS_PER_SM))
def test_programs_are_compiled(rows: int) -> None:
    compiling._SEEN.clear()
    dtype = torch.bfloat16
    count = rows // (HEADS // KV_HEADS)
    whole = torch.ones(1, dtype=torch.int32)
    k, v = (torch.zeros(1, KV_HEADS, PAGE, HEAD_DIM, dtype=dtype).transpose(1, 2) for _ in "kv")
    paged_decode.paged_decode_triton(
        torch.zeros(count, HEADS, HEAD_DIM, dtype=dtype),
        k,
        v,
        Spans(whole, torch.arange(count), whole, whole, whole[None]),
        scale=1.0,
        window=None,
        tiles=paged_decode.short_tiles(rows, HEAD_DIM, dtype),
        parts=paged_decode.new_parts(1, KV_HEADS, 2, rows, HEAD_DIM, torch.device("cpu")),
    )

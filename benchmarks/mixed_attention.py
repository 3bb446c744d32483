"""Attention of steps with prompts and decoding rows: all of it by FlashAttention, and with the
rows by a launch of their own, as the engine does.

    python -m benchmarks.mixed_attention [--heads 32] [--prompt 1024] [--rows 0,8,32,128,224]

Microseconds of a layer, medians; 8 key-value heads of 128, bfloat16, pages of 64. A step has 8,192
tokens: as many prompts as fit, and rows that decode behind `--prompt` keys and some more.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from statistics import median

import torch

from engine_service.attention.base import AttentionBatch, AttentionShape
from engine_service.attention.flash import LONG_QUERIES, FlashPlan
from engine_service.attention.select import open_backend
from engine_service.core.step import Span

_TOKENS, _KV_HEADS, _HEAD_DIM, _PAGE = 8192, 8, 128, 64
_ROUNDS, _AT_ONCE = 15, 8
_BACKLOG = 8_000_000
"""Cycles that the device stands still while calls are queued: FlashAttention's take the host longer
than the device."""
_BEHIND = 32
"""Tokens that a row has decoded."""


def make_step(prompt: int, rows: int, device: torch.device) -> AttentionBatch:
    """Prompts first, then the rows; pages are scattered."""
    count = (_TOKENS - rows) // prompt
    keys = [prompt] * count + [prompt + _BEHIND] * rows
    queries = [prompt] * count + [1] * rows
    spans = [
        Span(row, kv - q, kv, kv, 1, kv, kv)
        for row, (q, kv) in enumerate(zip(queries, keys, strict=True))
    ]
    width = -(-max(keys) // _PAGE)
    table = torch.randperm(len(spans) * width, device=device).to(torch.int32).view(-1, width)
    positions = torch.cat([torch.arange(span.start, span.stop) for span in spans]).to(device)
    owners = torch.repeat_interleave(torch.tensor(queries)).to(device)
    return AttentionBatch(
        cu_seqlens_q=torch.tensor([0, *queries]).cumsum(0).int().to(device),
        positions=positions,
        kv_lens=torch.tensor(keys, dtype=torch.int32, device=device),
        mask_block=torch.ones(len(spans), dtype=torch.int32, device=device),
        page_table=table,
        slot_mapping=table[owners, positions // _PAGE].long() * _PAGE + positions % _PAGE,
        max_query_len=max(queries),
        max_kv_len=max(keys),
        uniform_query_len=None,
        all_causal=True,
        spans=spans,
    )


def measure(run: Callable[[], torch.Tensor]) -> float:
    """Median microseconds of the device."""
    times = []
    for _ in range(_ROUNDS + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(_BACKLOG)
        begin.record()
        for _ in range(_AT_ONCE):
            run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / _AT_ONCE)
    return median(times[2:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--rows", default="0,8,32,128,224")
    options = parser.parse_args()
    counts = [int(count) for count in options.rows.split(",")]
    most = _TOKENS - max(counts)
    if not LONG_QUERIES <= options.prompt <= most:
        parser.error(
            f"--prompt {options.prompt} must lie in {LONG_QUERIES}..{most}: a step of {_TOKENS} "
            f"tokens holds one beside {max(counts)} rows"
        )
    device = torch.device("cuda", torch.cuda.current_device())
    shape = AttentionShape(
        num_heads=options.heads,
        num_kv_heads=_KV_HEADS,
        head_dim=_HEAD_DIM,
        page_size=_PAGE,
        dtype=torch.bfloat16,
    )
    backend, reason = open_backend("flash", shape, device, windows=(None,))
    print(f"{torch.cuda.get_device_name(device)}, {backend.name} {reason}")
    print(f"{'rows':>5} {'whole':>9} {'apart':>9} {'rows alone':>11}   us of a layer")
    for rows in counts:
        step = make_step(options.prompt, rows, device)
        cache = backend.empty_cache(int(step.page_table.max()) + 1, device)
        cache.k.normal_()
        cache.v.normal_()
        q = torch.randn(len(step.positions), options.heads, _HEAD_DIM, device=device)
        q = q.to(shape.dtype)

        attend = partial(backend.attend, q, cache=cache, scale=_HEAD_DIM**-0.5)
        apart = backend.plan(step, window=None)
        assert isinstance(apart, FlashPlan)
        whole = FlashPlan(step, None, True, step)
        parted, joined = attend(plan=apart), attend(plan=whole)
        off = float((parted - joined).abs().max() / joined.abs().max())
        assert off < 1e-2, f"they differ by {off}"
        plans = (whole, apart, apart._replace(few=None))
        figures = [measure(partial(attend, plan=plan)) for plan in plans]
        print(f"{rows:5} {figures[0]:9.1f} {figures[1]:9.1f} {figures[1] - figures[2]:11.1f}")


if __name__ == "__main__":
    main()

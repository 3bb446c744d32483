"""Measures how much memory a step takes and how much is left for the KV pool.

It does not know pages: bytes in, bytes out.
"""

from __future__ import annotations

import math
import os
import resource
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from engine_service.attention.base import AttentionBackend
from engine_service.config import EngineConfig
from engine_service.core.step import Memory, Span, granularity
from engine_service.models.base import CausalModel, ModelTraits
from engine_service.resolve import ResolvedConfig
from engine_service.sampling.batch import DecideBatch, Wants
from engine_service.sampling.head import HeadLogits
from engine_service.sampling.sampler import choose, choose_with_confidence, token_logprobs
from engine_service.stages import WHOLE, Stage
from engine_service.staging import stage as put
from engine_service.worker.batch import DecidePart, bind_batch, columns_of
from engine_service.worker.buckets import FILTERED, PLAIN, Bucket, captured_choices
from engine_service.worker.kv_pool import KVRoom
from engine_service.worker.layout import lay_out
from engine_service.worker.program import StepProgram
from engine_service.worker.tables import RowTables

_CGROUP = Path("/sys/fs/cgroup")
_WARM_UP_TOKENS = 16
_FEW_ROWS = (1, 4, 16, 32)
"""Steps of few rows run other kernels than long ones. One that does not compile or fit this device
must be found while everything can still be chosen anew."""
_BYTES_PER_GRAPH = 2 << 20
"""Of the driver, for the few hundred launches of a step."""
_EVERYTHING = Wants(
    sampling=True, filters=True, penalties=True, bias=True, suppress=True, max_logprobs=1
)


def find_room(
    config: EngineConfig,
    resolved: ResolvedConfig,
    model: CausalModel,
    backend: AttentionBackend,
    device: torch.device,
    buckets: Sequence[Bucket] = (),
    stage: Stage = WHOLE,
) -> KVRoom:
    """Runs a step of the layers of `stage` without requests and returns what it leaves for the KV
    pool.

    On CUDA they are the largest steps the budgets allow, of prompts and of full rows, and the peak
    is set aside, with what the graphs of `buckets` and other steps in flight will keep; on CPU a
    short one that only warms up, because activations are small beside the RAM that is left free.
    """
    if device.type != "cuda":
        prompts = whole_prompts(_WARM_UP_TOKENS, resolved, model.traits)
        rehearse(prompts, 1, resolved, model, backend, device, stage)
        return _cpu_room(config)

    short = full_rows(resolved, model.traits)
    for rows in sorted({min(few, len(short), resolved.logit_chunk) for few in _FEW_ROWS}):
        rehearse(short[:rows], rows, resolved, model, backend, device, stage)

    def peak_of(spans: list[Span], num_logits: int) -> int:
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        rehearse(spans, num_logits, resolved, model, backend, device, stage)
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before

    peak = max(
        peak_of(whole_prompts(resolved.token_budget, resolved, model.traits), resolved.logit_chunk),
        peak_of(full_rows(resolved, model.traits), resolved.logit_chunk),
    )
    if buckets:
        tokens = max(bucket.tokens for bucket in buckets)
        peak += peak_of(whole_prompts(tokens, resolved, model.traits), 1)
        peak += _graph_bytes(buckets, model, backend.shape.dtype, resolved.logit_chunk)
    hidden = resolved.token_budget * model.traits.hidden_size * backend.shape.dtype.itemsize
    peak += stage.num_waiting * hidden
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return _cuda_room(config.memory_fraction, free=free, total=total, peak=peak)


def decides_in_pieces(model: CausalModel) -> bool:
    """Whether plain rows are decided without ever having all of their logits: in models that
    reveal tokens, `choose_with_confidence` looks at one piece of the vocabulary after another."""
    return model.traits.mask_token_id is not None and model.has_head_factors


def _graph_bytes(
    buckets: Sequence[Bucket], model: CausalModel, dtype: torch.dtype, logit_chunk: int
) -> int:
    """What graphs keep beside activations: logits in their pool, of plain rows no more than a
    decision in pieces takes; hidden states behind it; and the graphs themselves (up to the states,
    and one for each of `captured_choices`)."""
    traits, decided = model.traits, max(bucket.decided for bucket in buckets)
    hidden = max(bucket.decided or bucket.tokens for bucket in buckets)
    has_whole_head, in_pieces = model.vocab_share is None, decides_in_pieces(model)
    num_graphs, logits = 0, 0
    for bucket in buckets:
        choices = captured_choices(bucket, logit_chunk=logit_chunk, has_whole_head=has_whole_head)
        num_graphs += 1 + len(choices)
        if FILTERED in choices or not in_pieces:
            logits = max(logits, bucket.decided)
    ends = decided * traits.num_heads * traits.head_dim if model.finishes_rows else 0
    numbers = logits * traits.vocab_size + hidden * traits.hidden_size + ends
    return numbers * dtype.itemsize + num_graphs * _BYTES_PER_GRAPH


@torch.inference_mode()
def rehearse(
    spans: list[Span],
    num_logits: int,
    resolved: ResolvedConfig,
    model: CausalModel,
    backend: AttentionBackend,
    device: torch.device,
    stage: Stage = WHOLE,
) -> None:
    """One forward of `spans` and all of sampling on `num_logits` rows of logits, in both of the
    ways in which a model that reveals tokens is decided: in pieces as many at once as a step may
    decide, if that many logits are the most that exist at once.

    Every span writes to one and the same page: the memory is that of a real step, the numbers
    mean nothing. All layers compute all tokens, which takes no less than a step takes whose last
    layer computes few.
    """
    traits = model.traits
    tables = RowTables(
        max_rows=resolved.max_rows,
        table_width=resolved.table_width,
        page_size=resolved.page_size,
        trash_page=0,
        mask_token_id=traits.mask_token_id,
        methods=(),
        device=device,
    )
    caches = [backend.empty_cache(1, device) for _ in stage.layers(traits.num_layers)]
    layout = lay_out(spans, tables, logits_shift=traits.logits_shift, logit_chunk=len(spans))
    batch = bind_batch(layout, put(columns_of(layout), device), tables)
    parts: dict[str, Any] = {"model": model, "backend": backend, "caches": caches}
    program = StepProgram(tables=tables, strategies=(), stage=stage.unlinked, **parts)
    hidden = program.forward(batch)
    if not traits.methods or not stage.is_last:
        return
    part = batch.decides[0]
    reveals = traits.mask_token_id is not None
    # What `StepProgram.states` keeps beside them then.
    mixed = hidden.new_empty(len(hidden), backend.shape.width if reveals else 0)
    if reveals:
        # First the way of plain rows, before all logits exist.
        most = num_logits == resolved.logit_chunk and decides_in_pieces(model)
        num_plain = resolved.logit_budget if most else num_logits
        choose_with_confidence(*_decision(hidden, part, num_plain, model, tables, PLAIN))
    _sample(hidden, part, num_logits, model, tables)
    del mixed


def whole_prompts(num_tokens: int, resolved: ResolvedConfig, traits: ModelTraits) -> list[Span]:
    """Whole prompts of `num_tokens` tokens in all, as long as rows allow; each decides by its last
    query, unless that would be beyond the row."""
    block = granularity(traits.mask_block)
    longest = max(block, min(num_tokens, resolved.table_width) // block * block)
    num_spans = max(1, min(resolved.max_rows, num_tokens // longest))
    decided = min(longest - 1 + traits.logits_shift, resolved.table_width - 1)
    return [Span(row, 0, longest, longest, block, decided, decided + 1) for row in range(num_spans)]


def full_rows(resolved: ResolvedConfig, traits: ModelTraits) -> list[Span]:
    """The last block that every row decides something behind, each as long as rows get."""
    block = granularity(traits.mask_block)
    stop = max(block, (resolved.table_width - 1) // block * block)
    decided = min(stop - 1 + traits.logits_shift, resolved.table_width - 1)
    num_spans = max(1, min(resolved.max_rows, resolved.token_budget // block))
    return [
        Span(row, stop - block, stop, stop, block, decided, decided + 1) for row in range(num_spans)
    ]


def _sample(
    hidden: torch.Tensor, part: DecidePart, num_logits: int, model: CausalModel, tables: RowTables
) -> None:
    """All of sampling, over whole logits."""
    decide, draws = _decision(hidden, part, num_logits, model, tables, _EVERYTHING)
    if model.traits.mask_token_id is None:
        token_ids = choose(decide, draws)
    else:
        token_ids = choose_with_confidence(decide, draws).token_ids
    token_logprobs(decide, token_ids)


def _decision(
    hidden: torch.Tensor,
    part: DecidePart,
    count: int,
    model: CausalModel,
    tables: RowTables,
    wants: Wants,
) -> tuple[DecideBatch, torch.Tensor]:
    """Of `count` positions, and the draws made at them."""
    where = torch.arange(count, device=hidden.device) % part.rows.shape[0]
    decide = DecideBatch(
        logits=HeadLogits(model, hidden[part.queries[where]]),
        rows=part.rows[where],
        positions=part.positions[where],
        span_rows=part.span_rows,
        cu_decide=part.cu_decide,
        tables=tables.sampling,
        wants=wants,
    )
    return decide, torch.zeros_like(decide.positions)


def _cuda_room(fraction: float, *, free: int, total: int, peak: int) -> KVRoom:
    """What fraction x total leaves beside everything in use and the peak of a step."""
    available = int(fraction * total) - (total - free) - peak

    def advice(needed: int) -> str:
        wanted = fraction + (needed - available) / total
        if wanted > 1:
            return "--dtype bfloat16 or use a larger device"
        return f"--memory-fraction {math.ceil(wanted * 100) / 100}"

    return KVRoom(available_bytes=available, advice=advice)


def _cpu_room(config: EngineConfig) -> KVRoom:
    """The operator's bound, or the share of free RAM if that is less."""
    free = int(config.memory_fraction * free_ram())
    if config.cpu_kv_bytes <= free:
        return KVRoom(
            available_bytes=config.cpu_kv_bytes, advice=lambda needed: f"--cpu-kv-bytes {needed}"
        )
    return KVRoom(
        available_bytes=free, advice=lambda needed: f"--dtype bfloat16 with {needed} bytes of RAM"
    )


def free_bytes(device: torch.device) -> int:
    """What is left of a device's memory; unused blocks of torch's allocator count as taken."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_ram()


def memory_in_use(device: torch.device, kv_bytes: int) -> Memory:
    """What metrics say of a device's memory; of a CPU's only what this process holds."""
    if device.type != "cuda":
        rusage = resource.getrusage(resource.RUSAGE_SELF)
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return Memory(pages * resource.getpagesize(), 0, rusage.ru_maxrss * 1024, kv_bytes)
    free, total = torch.cuda.mem_get_info(device)
    spare = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    peak = torch.cuda.max_memory_allocated(device)
    return Memory(total - free - spare, total, peak, kv_bytes)


def free_ram() -> int:
    """Bytes that this process may still take: of the machine, or of its container if less."""
    try:
        free = _machine_ram()
        limit, taken = (
            int((_CGROUP / f"memory.{name}").read_text()) for name in ("max", "current")
        )
        told = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        # No container limit is set ("max"), or the system has no such files.
        return _machine_ram()
    # Files that were read stay until somebody needs the room: a checkpoint's are gigabytes.
    cached = int(told.get("active_file", 0)) + int(told.get("inactive_file", 0))
    return min(free, max(0, limit - max(0, taken - cached)))


def _machine_ram() -> int:
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

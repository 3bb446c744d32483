"""The profiling pass rehearses steps that real plans could contain, on any device."""

from types import SimpleNamespace as Facts

import pytest
import torch

from engine_service.attention.base import AttentionShape
from engine_service.attention.select import create_backend
from engine_service.config import EngineConfig
from engine_service.core.step import granularity
from engine_service.resolve import resolve
from engine_service.worker.buckets import Bucket
from engine_service.worker.checkpoint import fetch_checkpoint
from engine_service.worker.memory import (
    _BYTES_PER_GRAPH,
    _graph_bytes,
    full_rows,
    rehearse,
    whole_prompts,
)
from engine_service.worker.weights import load_model, read_traits

CPU = torch.device("cpu")


@pytest.mark.parametrize("max_model_len", [192, 250])
@pytest.mark.parametrize("name", ["demo", "demo-block", "demo-canvas"])
def test_prompts_and_full_rows_run(name: str, max_model_len: int) -> None:
    config = EngineConfig(model=name, max_model_len=max_model_len, max_rows=4, token_budget=300)
    checkpoint = fetch_checkpoint(config, lambda *_: None)
    traits = read_traits(checkpoint)
    resolved = resolve(config, traits, CPU)
    model = load_model(config, checkpoint, device=CPU, dtype=torch.float32, report=lambda *_: None)
    shape = AttentionShape(
        num_heads=traits.num_heads,
        num_kv_heads=traits.num_kv_heads,
        head_dim=traits.head_dim,
        page_size=resolved.page_size,
        dtype=torch.float32,
    )
    backend = create_backend("sdpa", shape)
    block = granularity(traits.mask_block)
    prompts = whole_prompts(resolved.token_budget, resolved, traits)
    rows = full_rows(resolved, traits)
    assert 0 < sum(span.num_tokens for span in prompts) <= resolved.token_budget
    assert len(rows) == 4
    assert all(max_model_len - 2 * block <= span.kv_len for span in rows)
    for spans in (prompts, rows):
        rehearse(spans, 2, resolved, model, backend, CPU)


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize(
    ("block", "width", "budget"), [(1, 64, 1), (1, 64, 64), (1, 2, 8), (32, 32, 32), (4, 8, 300)]
)
def test_steps_of_the_smallest_engines_are_steps(
    block: int, width: int, budget: int, shift: int
) -> None:
    """Positions of a row, decided by a query of the span."""
    resolved = Facts(max_rows=1, table_width=width, token_budget=budget)
    traits = Facts(mask_block=block, logits_shift=shift)
    prompts = whole_prompts(budget, resolved, traits)  # type: ignore[arg-type]
    for span in (*prompts, *full_rows(resolved, traits)):  # type: ignore[arg-type]
        assert 0 <= span.start < span.stop <= width, span
        assert span.start <= span.decide_start - shift < span.stop, span
        assert span.decide_stop <= width, span


@pytest.mark.parametrize(
    ("mask", "share", "graphs", "logits"),
    [
        (None, None, 1 + 3 + 3, 64),  # causal: whole logits in any case
        (None, (0, 500), 1 + 2 + 2, 64),
        (7, None, 1 + 3 + 2, 32),  # reveals: plain rows in pieces, filtered ones up to the chunk
        (7, (0, 500), 1 + 2 + 2, 0),
    ],
)
def test_what_graphs_keep(
    mask: int | None, share: tuple[int, int] | None, graphs: int, logits: int
) -> None:
    chunk = 64 if mask is None else 40
    traits = Facts(mask_token_id=mask, vocab_size=1000, hidden_size=16)
    model = Facts(traits=traits, vocab_share=share, has_head_factors=True, finishes_rows=False)
    buckets = [Bucket(1, 96, 96, 0), Bucket(1, 32, 32, 32), Bucket(2, 64, 32, 64)]
    got = _graph_bytes(buckets, model, torch.bfloat16, chunk)  # type: ignore[arg-type]
    assert got == 2 * (logits * 1000 + 96 * 16) + graphs * _BYTES_PER_GRAPH

"""What is kept of a verified draft on a CUDA device is what the CPU keeps; captured steps too."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine_service.decoding.verifier import Draft, accepted
from tests.sampling_batches import on_device
from tests.unit.test_verifier import random_case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_captured_launched_and_on_the_cpu(dtype: torch.dtype, seed: int) -> None:
    """Filters are no part of captured steps; without them a step is two launches of kernels."""
    for one in range(seed, seed + 10):
        case = random_case(one, dtype=dtype)
        wants = replace(case.batch.wants, filters=False)
        want = replace(case, batch=replace(case.batch, wants=wants)).kept()
        batch = on_device(replace(case.batch, wants=wants), "cuda")
        own = case.draft
        draft = Draft(
            token_ids=own.token_ids.cuda(), is_open=own.is_open.cuda(), draws=own.draws.cuda()
        )
        causal, weight = case.causal.cuda(), case.weight.cuda()
        assert torch.equal(accepted(batch, draft, causal, weight).cpu(), want)
        torch.cuda.set_sync_debug_mode("error")
        try:
            accepted(batch, draft, causal, weight)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kept = accepted(batch, draft, causal, weight)
        causal.copy_(causal.flip(0))
        graph.replay()
        flipped = replace(case, batch=replace(case.batch, wants=wants))
        flipped.causal = case.causal.flip(0)
        assert torch.equal(kept.cpu(), flipped.kept())

"""Whichever GPU an engine has and whoever calls it, and what a profile of it shows."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from engine_service.worker.profiler import TorchProfiler
from tests.gpu.test_failures import build, tokens

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def own_device() -> Iterator[None]:
    """An engine makes its device its thread's own."""
    before = torch.cuda.current_device()
    yield
    torch.cuda.set_device(before)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize("model", ["demo", "demo-block"])
def test_any_thread_may_ask_an_engine_of_another_device(
    own_device: None, model: str, enforce_eager: bool
) -> None:
    with build(model, device="cuda:1", enforce_eager=enforce_eager) as llm:
        expected = tokens(llm)
        with ThreadPoolExecutor(1) as others:
            assert others.submit(torch.cuda.current_device).result() == 0
            assert others.submit(tokens, llm).result() == expected
            assert others.submit(torch.cuda.current_device).result() == 0


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_a_profile_shows_what_the_device_did(tmp_path: Path, enforce_eager: bool) -> None:
    """Kernels of replayed graphs too, and beside them what the host called."""
    with build("demo", enforce_eager=enforce_eager) as llm:
        expected = tokens(llm)
        profiler = TorchProfiler(records_cuda=True)
        profiler.start(str(tmp_path))
        assert tokens(llm) == expected
        (written,) = profiler.stop()
        assert tokens(llm) == expected
    with gzip.open(written) as trace:
        events = json.load(trace)["traceEvents"]
    kinds = [event.get("cat") for event in events]
    assert kinds.count("kernel") > 40
    assert ("cudaGraphLaunch" in [event.get("name") for event in events]) is not enforce_eager

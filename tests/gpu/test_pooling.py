"""Vectors of a CUDA device are those of the CPU: decoders of every mask, and BERT."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from engine_service.core.params import PoolChoice
from tests.equivalence.pooling import make_engine, run, submit
from tests.models.checkpoints import SIZES, Case
from tests.models.checkpoints import write as write_decoder
from tests.models.encoders import write as write_bert

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def vectors(folder: Path, prompts: list[list[int]], **flags: object) -> list[np.ndarray]:
    """Pooled in every way, beside prompts that are gone on with where the model can."""
    engine = make_engine(folder, **flags)
    for key, prompt in enumerate(prompts):
        if engine.facts.methods:
            submit(engine, 100 + key, prompt, None)
        submit(engine, key, prompt, PoolChoice(kind=("mean", "last", "cls")[key % 3]))
    outcome = run(engine)
    return [outcome.vector(key) for key in range(len(prompts))]


@pytest.mark.parametrize("kind", ["qwen3", "bert"])
@pytest.mark.parametrize("budget", [16, 96])
def test_as_on_the_cpu(kind: str, budget: int, tmp_path: Path, seed: int) -> None:
    if kind == "qwen3":
        case = Case(name="qwen3", kind="Qwen3", options={"head_dim": 16})
        write_decoder(case, tmp_path, seed)
        vocab, longest, flags = SIZES["vocab_size"], 80, {"token_budget": budget}
    else:
        write_bert(tmp_path, "BertModel", hidden_size=64)
        vocab, longest, flags = 120, 64, {"max_model_len": 64, "token_budget": max(64, budget)}
    rng = random.Random(seed)
    prompts = [[rng.randrange(vocab) for _ in range(rng.randint(1, longest))] for _ in range(12)]
    want = vectors(tmp_path, prompts, device="cpu", **flags)
    got = vectors(tmp_path, prompts, device="cuda", dtype="float32", **flags)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)

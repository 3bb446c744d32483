"""Steps of a diffusion model whose rows are plain never make logits of the whole vocabulary."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine_service.sampling import sampler
from tests.equivalence.engine_runs import run
from tests.equivalence.test_worker_canvas import write_llada
from tests.equivalence.test_worker_engine import as_sdar, make_engine, make_prompts
from tests.models.checkpoints import SIZES, Case, write

VOCAB, PIECE, ANSWER = SIZES["vocab_size"], 100, 16
"""Nothing else in these models is as wide as the vocabulary or a piece."""


class Widths(TorchDispatchMode):
    """The last axis of every matrix that an operator makes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for one in made if isinstance(made, tuple | list) else (made,):
            if isinstance(one, torch.Tensor) and one.is_floating_point() and one.ndim > 1:
                self.seen.add(one.shape[-1])
        return made


@pytest.fixture(scope="module", params=["block", "canvas"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = tmp_path_factory.mktemp(request.param)
    if request.param == "canvas":
        write_llada(made, 3)
    else:
        write(Case(name="sdar", kind="Qwen3", options={"head_dim": 16}, edit=as_sdar), made, seed=5)
    return made


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "PIECE", PIECE)


def knobs_of(count: int) -> list[dict[str, Any]]:
    rules = [{"threshold": 0.3}, {"remasking": "topk_margin"}, {"remasking": "entropy"}]
    return [rules[index % len(rules)] for index in range(count)]


def generate(folder: Path, **sampling: Any) -> tuple[set[int], int, list[list[int]]]:
    """(widths of matrices, products of the whole head, tokens) of five requests."""
    engine = make_engine(folder)
    model = engine.executor._runner._program.model
    whole, count = type(model).logits, 0

    def counting(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        nonlocal count
        count += 1
        return whole(self, hidden)

    prompts = make_prompts(random.Random(7), 5)
    with pytest.MonkeyPatch.context() as patched, Widths() as widths:
        patched.setattr(type(model), "logits", counting)
        outputs, _ = run(engine, prompts, ANSWER, knobs_of(5), **sampling)
    return widths.seen, count, outputs


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "seed": 3}], ids=["greedy", "warm"])
def test_plain_steps_see_a_piece_at_a_time(folder: Path, sampling: dict[str, Any]) -> None:
    widths, products, outputs = generate(folder, **sampling)
    assert products == 0
    assert widths & {PIECE, VOCAB} == {PIECE}
    # What needs all logits has them, and gets the same tokens.
    widths, products, same = generate(folder, logprobs=0, **sampling)
    assert products > 0
    assert widths & {PIECE, VOCAB} == {VOCAB}
    assert same == outputs

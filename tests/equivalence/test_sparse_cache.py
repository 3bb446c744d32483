"""The sparse cache, core and worker together, against its slow restatement and its own limits."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from engine_service.kernels import keep_keys
from tests.equivalence.engine_runs import run
from tests.equivalence.oracles_dense import DenseLLaDA
from tests.equivalence.oracles_fast_dllm import threshold_rule
from tests.equivalence.oracles_sparse import sparse_generate
from tests.equivalence.test_worker_canvas import ANSWER, MASK, write_llada
from tests.equivalence.test_worker_engine import make_engine, make_prompts

TIGHT = {"page_size": 8, "num_pages": 24, "token_budget": 96}
"""Fewer pages than all requests of a test would take at once."""


@pytest.fixture(scope="module", params=[4, 2], ids=["MHA", "GQA"])
def llada(request, tmp_path_factory) -> tuple[Path, DenseLLaDA]:
    folder = tmp_path_factory.mktemp("llada")
    return folder, write_llada(folder, 7, n_kv_heads=request.param)


def random_knobs(rng: random.Random) -> dict[str, Any]:
    knobs: dict[str, Any] = {
        "cache": "sparse",
        "block_length": rng.choice([5, 8, 24]),
        "threshold": rng.choice([0.3, 0.6, 0.9, 2.0]),
        "retention_ratio": rng.choice([0.05, 0.3, 0.5, 0.8, 1.0]),
        "delay_step": rng.randint(0, 3),
        "head_select": rng.random() < 0.5,
        "pool_kernel": rng.choice([1, 3, 7]),
    }
    if rng.random() < 0.5:
        knobs["refresh_interval"] = rng.randint(1, 4)
    return knobs


def restated(dense: DenseLLaDA, prompt: list[int], knobs: dict[str, Any]) -> list[int]:
    return _restated(dense, tuple(prompt), tuple(knobs.items()))


@cache
def _restated(
    dense: DenseLLaDA, prompt: tuple[int, ...], items: tuple[tuple[str, Any], ...]
) -> list[int]:
    knobs = dict(items)
    return sparse_generate(
        dense,
        prompt,
        mask_id=MASK,
        gen_length=ANSWER,
        block_length=knobs["block_length"],
        rule=threshold_rule(knobs["threshold"]),
        ratio=knobs["retention_ratio"],
        delay=knobs["delay_step"],
        by_head=knobs["head_select"],
        pool=knobs["pool_kernel"],
        refresh_every=knobs.get("refresh_interval"),
    ).tokens


@pytest.mark.parametrize("flags", [{}, TIGHT])
@pytest.mark.parametrize("seed", range(2))
def test_tokens_are_those_of_the_restated_loop(llada, flags, seed):
    folder, dense = llada
    rng = random.Random(seed)
    prompts = make_prompts(rng, 8)
    knobs = [random_knobs(rng) for _ in prompts]
    outputs, _ = run(make_engine(folder, **flags), prompts, ANSWER, knobs)
    assert outputs == [restated(dense, *one) for one in zip(prompts, knobs, strict=True)]


def test_control_another_choice_of_keys_is_seen(llada):
    folder, dense = llada
    rng = random.Random(0)
    prompts = make_prompts(rng, 8)
    knobs = [{**random_knobs(rng), "retention_ratio": 0.3, "threshold": 2.0} for _ in prompts]

    def first_ones(scores: torch.Tensor, *spans: object) -> torch.Tensor:
        return torch.zeros_like(scores)

    with patch.object(keep_keys, "_pool", first_ones):
        outputs, _ = run(make_engine(folder), prompts, ANSWER, knobs)
    assert outputs != [restated(dense, *one) for one in zip(prompts, knobs, strict=True)]


def outputs_with(folder: Path, seed: int, common: dict[str, Any]) -> list[list[int]]:
    return _outputs(folder, seed, tuple(common.items()))


@cache
def _outputs(folder: Path, seed: int, common: tuple[tuple[str, Any], ...]) -> list[list[int]]:
    rng = random.Random(seed)
    prompts = make_prompts(rng, 6)
    knobs = [
        {
            "threshold": rng.choice([0.3, 0.9, 2.0]),
            "block_length": rng.choice([5, 8]),
            **dict(common),
        }
        for _ in prompts
    ]
    return run(make_engine(folder), prompts, ANSWER, knobs)[0]


@pytest.mark.parametrize("by_head", [False, True])
def test_with_every_key_kept_it_is_the_dual_cache(llada, by_head):
    every = {"cache": "sparse", "retention_ratio": 1.0, "delay_step": 0, "head_select": by_head}
    half = {**every, "retention_ratio": 0.5}
    for seed in range(2):
        assert outputs_with(llada[0], seed, every) == outputs_with(
            llada[0], seed, {"cache": "dual"}
        )
    assert outputs_with(llada[0], 0, every) != outputs_with(llada[0], 0, half), "the control"


def test_refreshed_at_every_step_it_is_exact(llada):
    fresh = {"cache": "sparse", "retention_ratio": 0.2, "refresh_interval": 1}
    stale = {"cache": "sparse", "retention_ratio": 0.2}
    for seed in range(2):
        assert outputs_with(llada[0], seed, fresh) == outputs_with(llada[0], seed, {})
    assert outputs_with(llada[0], 0, fresh) != outputs_with(llada[0], 0, stale), "the control"


def test_neighbours_change_nothing(llada):
    rng = random.Random(5)
    prompts = make_prompts(rng, 9)
    knobs = [random_knobs(rng) for _ in prompts]
    knobs[::3] = [{"cache": "dual", "threshold": 0.9}, {}, {"cache": "prefix", "threshold": 0.5}]
    together, _ = run(make_engine(llada[0], **TIGHT), prompts, ANSWER, knobs)
    engine = make_engine(llada[0])
    alone = [
        run(engine, [prompt], ANSWER, [one])[0][0]
        for prompt, one in zip(prompts, knobs, strict=True)
    ]
    assert together == alone


def most_pages(folder: Path, knobs: dict[str, Any]) -> int:
    """Pages in use at most, as the pool counts them, by one request of 80 positions."""
    engine = make_engine(folder, page_size=8, num_pages=40)
    used = []
    pool = engine.scheduler._pages
    schedule = engine.scheduler.schedule

    def watched() -> object:
        plan = schedule()
        used.append(pool.num_used)
        return plan

    with patch.object(engine.scheduler, "schedule", watched):
        run(engine, [[3] * 64], 16, [{"block_length": 8, "threshold": 2.0, **knobs}])
    assert pool.num_used == 0
    return max(used)


def test_pages_are_taken_for_what_is_kept(llada):
    """80 positions, 8 of them a block: a share of the 72 others is kept, behind it the block."""
    assert most_pages(llada[0], {"cache": "dual"}) == 10
    for ratio, pages in ((1.0, 10), (0.5, 6), (0.25, 4), (0.01, 2)):
        assert pages == -(-(max(1, int(72 * ratio)) + 8) // 8)
        assert most_pages(llada[0], {"cache": "sparse", "retention_ratio": ratio}) == pages
    assert most_pages(llada[0], {}) == 0

"""Dream's shifted logits over every cache, core and worker together, against Fast-dLLM's loop."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.equivalence.engine_runs import run
from tests.equivalence.oracles_dense import DenseQwen2
from tests.equivalence.test_worker_canvas import ANSWER, as_dream, by_threshold
from tests.equivalence.test_worker_engine import make_engine, make_prompts
from tests.models.checkpoints import Case, write

THRESHOLDS = [0.1, 0.5, 0.9, 0.99, 2.0]
EVERY_KEY = {"cache": "sparse", "retention_ratio": 1.0, "delay_step": 0}
FEW_KEYS = {"cache": "sparse", "retention_ratio": 0.2}
KINDS: dict[str, tuple[dict[str, Any], str, int | None]] = {
    "none": ({}, "none", None),
    "prefix": ({"cache": "prefix"}, "prefix", None),
    "dual": ({"cache": "dual"}, "dual", None),
    "dual, now and then fresh": ({"cache": "dual", "refresh_interval": 3}, "dual", 3),
    "prefix, always fresh": ({"cache": "prefix", "refresh_interval": 1}, "none", None),
    "dual, always fresh": ({"cache": "dual", "refresh_interval": 1}, "none", None),
    "sparse, every key": (EVERY_KEY, "dual", None),
    "sparse, every key by head": ({**EVERY_KEY, "head_select": True}, "dual", None),
    "sparse, always fresh": ({**FEW_KEYS, "refresh_interval": 1}, "none", None),
}
"""By name: knobs, and the cache and refresh of the loop that they are the same as."""


@pytest.fixture(scope="module", params=[5, 6])
def dream(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, DenseQwen2]:
    folder = tmp_path_factory.mktemp("dream")
    model = write(Case(name="dream", kind="Qwen2", edit=as_dream), folder, seed=request.param)
    return folder, DenseQwen2(model.state_dict(), model.config.to_dict())


def asked(seed: int) -> list[list[int]]:
    return make_prompts(random.Random(seed), len(THRESHOLDS))


def engine_says(folder: Path, knobs: dict[str, Any]) -> list[list[int]]:
    """Five requests in one engine, a threshold each."""
    common = {"block_length": 8, **knobs}
    whole = [{"threshold": threshold, **common} for threshold in THRESHOLDS]
    flags = {"page_size": 8, "num_pages": 40, "token_budget": 96}
    return run(make_engine(folder, **flags), asked(2), ANSWER, whole)[0]


def loop_says(
    dense: DenseQwen2, cache: str, refresh_every: int | None, *, shift: int = 1
) -> list[list[int]]:
    return [
        by_threshold(
            dense, prompt, threshold, cache, refresh_every=refresh_every, shift=shift
        ).tokens
        for prompt, threshold in zip(asked(2), THRESHOLDS, strict=True)
    ]


@pytest.mark.parametrize("name", KINDS)
def test_tokens_are_those_of_the_loop(dream: tuple[Path, DenseQwen2], name: str) -> None:
    folder, dense = dream
    knobs, cache, refresh_every = KINDS[name]
    assert engine_says(folder, knobs) == loop_says(dense, cache, refresh_every)


def test_control_caches_and_the_shift_are_told_apart(dream: tuple[Path, DenseQwen2]) -> None:
    folder, dense = dream
    said = [loop_says(dense, cache, None) for cache in ("none", "prefix", "dual")]
    said += [loop_says(dense, "dual", 3), loop_says(dense, "dual", None, shift=0)]
    assert all(one != other for at, one in enumerate(said) for other in said[:at])
    assert engine_says(folder, FEW_KEYS) not in said, "a sparse cache that is no other one"

"""The authors choose out of the whole vocabulary: where that never is the mask token, nothing is
changed by leaving it out, as the restated loops and the engine do."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.equivalence import oracles, oracles_dream
from tests.equivalence.engine_runs import run
from tests.equivalence.harness import BLOCK, Setup, ToyEngine
from tests.equivalence.oracles import Outcome
from tests.equivalence.oracles_dense import DenseLLaDA, DenseToy
from tests.equivalence.oracles_dream import dream_sample
from tests.equivalence.oracles_fast_dllm import CACHES, fast_dllm_generate, threshold_rule
from tests.equivalence.oracles_llada import llada_generate
from tests.equivalence.oracles_sdar import sdar_generate
from tests.equivalence.test_full_canvas import NAME, engine
from tests.equivalence.test_worker_canvas import ANSWER, write_llada
from tests.equivalence.test_worker_canvas import MASK as LLADA_MASK
from tests.equivalence.test_worker_engine import make_engine, make_prompts
from tests.fakes import MASK, ToyModel

LENGTH, SIZE = 16, 4
PROMPT = [3, 1, 4, 1, 5]
SIZES: dict[str, int] = {"mask_id": MASK, "gen_length": LENGTH}
BLOCKS: dict[str, int] = {**SIZES, "block_length": SIZE}
Decode = Callable[[], Outcome]


@contextmanager
def whole_vocabulary() -> Iterator[list[int]]:
    """The restated loops choose as the authors' do; yields how often the mask token was first."""
    num_masks: list[int] = []

    def distributions(logits_NV: torch.Tensor, mask_id: int) -> torch.Tensor:
        num_masks.append(int((logits_NV.argmax(-1) == mask_id).sum()))
        return logits_NV.softmax(-1)

    with (
        patch.object(oracles, "distributions", distributions),
        patch.object(oracles_dream, "distributions", distributions),
    ):
        yield num_masks


def check_choice(decodes: list[Decode]) -> list[list[int]]:
    """Tokens of the authors' own choice, which never is the mask token."""
    with whole_vocabulary() as num_masks:
        chosen = [decode().tokens for decode in decodes]
    assert len(num_masks) > len(decodes)
    assert sum(num_masks) == 0, "the mask token was chosen"
    assert chosen == [decode().tokens for decode in decodes]
    return chosen


def toy(seed: int, mask_scale: float = 0.0) -> ToyModel:
    """Its logit of the mask token is scaled: far below the best of forty, or far above."""
    model = ToyModel(seed)
    model.head[MASK] *= mask_scale
    return model


def loops(model: ToyModel) -> dict[str, tuple[str, dict[str, Any], Decode]]:
    """By name: the engine's method, its knobs, and the loop that they restate."""
    dense = DenseToy(model)
    fixed = {"remasking": "low_confidence", "steps": 8, "block_length": SIZE}
    entropy = {"remasking": "entropy", "steps": 9, "block_length": LENGTH}
    static = {"remasking": "low_confidence_static", "steps": 2}
    llada = partial(llada_generate, dense.logits, PROMPT, steps=8, **BLOCKS)
    dream = partial(dream_sample, dense.logits, PROMPT, steps=9, alg="entropy", **SIZES)
    sdar = partial(
        sdar_generate,
        dense.block_logits(SIZE),
        PROMPT,
        denoising_steps=2,
        strategy="low_confidence_static",
        **BLOCKS,
    )
    made: dict[str, tuple[str, dict[str, Any], Decode]] = {
        "llada": (NAME, fixed, llada),
        "dream": (NAME, entropy, dream),
        "sdar": (BLOCK, static, sdar),
    }
    for cache in CACHES:
        knobs = {"threshold": 0.5, "cache": cache, "block_length": SIZE}
        rule = threshold_rule(0.5)
        fast = partial(fast_dllm_generate, dense.cached, PROMPT, rule=rule, cache=cache, **BLOCKS)
        made[f"fast-{cache}"] = (NAME, knobs, fast)
    return made


@pytest.mark.parametrize("name", loops(ToyModel()))
def test_toys_say_what_the_authors_choice_says(name: str) -> None:
    for seed in range(6):
        model = toy(seed)
        method, knobs, decode = loops(model)[name]
        ours = (
            ToyEngine(model, Setup(block=SIZE))
            if method == BLOCK
            else engine(model, shift=int(name == "dream"))
        )
        key = ours.submit(PROMPT, LENGTH, method, knobs)
        ours.run()
        assert [ours.results[key].tokens] == check_choice([decode])


@pytest.mark.parametrize("name", loops(ToyModel()))
def test_control_a_mask_token_that_is_chosen_is_seen(name: str) -> None:
    decodes = [loops(toy(seed, mask_scale=3.0))[name][2] for seed in range(6)]
    with pytest.raises(AssertionError, match="the mask token was chosen"):
        check_choice(decodes)


def authors_loops(dense: DenseLLaDA, prompts: list[list[int]]) -> list[Decode]:
    """LLaDA's for the first prompts, Fast-dLLM's for the others."""
    sizes = {"mask_id": LLADA_MASK, "gen_length": ANSWER, "block_length": 8}
    made: list[Decode] = [
        partial(llada_generate, dense.logits, prompt, steps=12, **sizes) for prompt in prompts[:3]
    ]
    for prompt, cache in zip(prompts[3:], CACHES, strict=True):
        rule = threshold_rule(0.3)
        made.append(
            partial(fast_dllm_generate, dense.cached, prompt, rule=rule, cache=cache, **sizes)
        )
    return made


@pytest.mark.parametrize("seed", [3, 4])
def test_the_whole_engine_says_what_the_authors_choice_says(seed: int, tmp_path: Path) -> None:
    dense = write_llada(tmp_path, seed, mask_scale=0.0)
    prompts = make_prompts(random.Random(seed), 6)
    knobs: list[dict[str, Any]] = [
        {"remasking": "low_confidence", "steps": 12, "block_length": 8} for _ in range(3)
    ]
    knobs += [{"threshold": 0.3, "cache": cache, "block_length": 8} for cache in CACHES]
    outputs, _ = run(make_engine(tmp_path), prompts, ANSWER, knobs)
    assert outputs == check_choice(authors_loops(dense, prompts))


def test_control_a_checkpoint_that_says_the_mask_token_is_seen(tmp_path: Path) -> None:
    dense = write_llada(tmp_path, 3, mask_scale=3.0)
    decodes = authors_loops(dense, make_prompts(random.Random(3), 6))
    with pytest.raises(AssertionError, match="the mask token was chosen"):
        check_choice(decodes)

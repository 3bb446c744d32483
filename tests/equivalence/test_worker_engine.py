"""The engine as it ships, core and worker together, against slow loops over dense models."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from engine_service.composition import Engine, compose
from engine_service.config import EngineConfig
from tests.equivalence.engine_runs import run
from tests.equivalence.references import random_knobs, reference_block
from tests.fakes import MASK
from tests.models.checkpoints import SIZES, Case, write
from tidemill.runtime.errors import InvalidRequest

VOCAB = SIZES["vocab_size"]
BLOCK = 8


class Dense:
    """transformers' model without a cache, under a block-causal mask of any granularity."""

    def __init__(self, model) -> None:
        self._model = model

    @torch.no_grad()
    def dense(self, tokens: list[int], block: int) -> torch.Tensor:
        """[len(tokens), V] logits."""
        places = torch.arange(len(tokens))
        seen = places[None, :] < (places[:, None] // block + 1) * block
        mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
        return self._model(torch.tensor([tokens]), attention_mask=mask[None, None]).logits[0]


def as_sdar(config: dict) -> None:
    """SDAR's weights are Qwen3's; its config.json names the block and the mask."""
    config |= {
        "architectures": ["SDARForCausalLM"],
        "model_type": "sdar",
        "block_size": BLOCK,
        "mask_token_id": MASK,
    }


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folder and dense model of an autoregressive and of a block-diffusion checkpoint."""
    made = {}
    for name, edit in (("qwen3", None), ("sdar", as_sdar)):
        folder = tmp_path_factory.mktemp(name)
        case = Case(name=name, kind="Qwen3", options={"head_dim": 16}, edit=edit)
        made[name] = folder, Dense(write(case, folder, seed=5))
    return made


def make_engine(folder: Path, **flags: object) -> Engine:
    settings = {"device": "cpu", "max_rows": 4, "max_model_len": 96, "max_logprobs": 20, **flags}
    return compose(EngineConfig(model=str(folder), **settings), lambda *stage: None)


def reference_ar(model: Dense, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(model.dense(tokens, 1)[-1].argmax()))
    return tokens[len(prompt) :]


def make_prompts(rng: random.Random, count: int, longest: int = 40) -> list[list[int]]:
    """Half of them begin alike, so that pages are shared."""
    shared = [rng.randrange(VOCAB) for _ in range(longest // 2)]
    prompts = []
    for index in range(count):
        own = [rng.randrange(VOCAB) for _ in range(rng.randint(1, longest // 2))]
        prompts.append(shared + own if index % 2 else own)
    return prompts


SETUPS = [
    {"page_size": 16},
    {"page_size": 8, "token_budget": 8, "logit_budget": 8},
    {"page_size": 4, "token_budget": 24, "num_pages": 25, "prefix_caching": False},
    {"page_size": 8, "num_pages": 13},
]


@pytest.mark.parametrize("setup", SETUPS)
def test_autoregression_equals_the_dense_loop(models, setup):
    folder, dense = models["qwen3"]
    prompts = make_prompts(random.Random(1), 8)
    outputs, preemptions = run(make_engine(folder, **setup), prompts, 10)
    assert outputs == [reference_ar(dense, prompt, 10) for prompt in prompts]
    assert (preemptions > 0) == ("num_pages" in setup)


@pytest.mark.parametrize("setup", SETUPS)
def test_block_diffusion_equals_the_dense_loop(models, setup):
    folder, dense = models["sdar"]
    rng = random.Random(3)
    prompts = make_prompts(rng, 8)
    knobs = [random_knobs(rng, BLOCK) for _ in prompts]
    outputs, preemptions = run(make_engine(folder, **setup), prompts, 20, knobs)
    for prompt, knob, output in zip(prompts, knobs, outputs, strict=True):
        assert output == reference_block(dense, prompt, 20, BLOCK, knob)
    assert (preemptions > 0) == ("num_pages" in setup)


@pytest.mark.parametrize("name", ["qwen3", "sdar"])
def test_samples_do_not_depend_on_budgets_batches_or_preemption(models, name):
    folder, _ = models[name]
    rng = random.Random(7)
    prompts = make_prompts(rng, 6)
    sampling = {"temperature": 8.0, "top_p": 0.95, "seed": 3}
    results = []
    for setup in SETUPS:
        results.append(run(make_engine(folder, **setup), prompts, 12, **sampling)[0])
    alone = make_engine(folder)
    results.append([run(alone, [prompt], 12, **sampling)[0][0] for prompt in prompts])
    assert all(result == results[0] for result in results)
    other, _ = run(make_engine(folder), prompts, 12, **sampling | {"seed": 4})
    assert other != results[0]  # the control


def test_a_too_small_pool_is_refused_with_flags_that_help(models):
    folder, _ = models["qwen3"]
    with pytest.raises(InvalidRequest, match="--num-pages 12") as caught:
        make_engine(folder, page_size=8, num_pages=11)
    assert caught.value.facts["estimated_max_model_len"] == "88"
    with pytest.raises(InvalidRequest, match="--cpu-kv-bytes"):
        make_engine(folder, page_size=8, cpu_kv_bytes=10_000)

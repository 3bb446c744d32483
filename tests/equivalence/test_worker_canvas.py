"""Full-canvas models as they ship, core and worker together, against the authors' loops."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine_service.worker import build_kernels
from tests.equivalence.engine_runs import run
from tests.equivalence.oracles import Outcome
from tests.equivalence.oracles_dense import DenseLLaDA
from tests.equivalence.oracles_dream import dream_sample
from tests.equivalence.oracles_fast_dllm import fast_dllm_generate, threshold_rule
from tests.equivalence.oracles_llada import llada_generate
from tests.equivalence.test_worker_engine import Dense, make_engine, make_prompts
from tests.models.checkpoints import SIZES, Case, write
from tidemill.runtime.errors import InvalidRequest

VOCAB, MASK, ANSWER = SIZES["vocab_size"], 319, 24
LLADA = {
    "architectures": ["LLaDAModelLM"],
    "model_type": "llada",
    "d_model": 64,
    "n_layers": 2,
    "n_heads": 4,
    "n_kv_heads": 4,
    "mlp_hidden_size": 96,
    "max_sequence_length": 128,
    "vocab_size": VOCAB,
    "embedding_size": VOCAB,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "weight_tying": False,
    "mask_token_id": MASK,
    "eos_token_id": 318,
    "torch_dtype": "float32",
}


def write_llada(
    folder: Path, seed: int, *, width: float = 0.3, mask_scale: float = 1.0, **changes: int
) -> DenseLLaDA:
    """Random weights, large enough for peaked logits; `changes` are of the configuration.

    The logit of the mask token is scaled by `mask_scale`.
    """
    config = LLADA | changes
    generator = torch.Generator().manual_seed(seed)
    size, inner = LLADA["d_model"], LLADA["mlp_hidden_size"]

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * width

    tensors = {"wte": draw(VOCAB, size), "ff_out": draw(VOCAB, size), "ln_f": 1 + draw(size)}
    tensors["ff_out"][MASK] *= mask_scale
    for layer in range(LLADA["n_layers"]):
        narrow = size * config["n_kv_heads"] // config["n_heads"]
        own = {name: draw(size, size) for name in ("q_proj", "attn_out")}
        own |= {name: draw(narrow, size) for name in ("k_proj", "v_proj")}
        own |= {"ff_proj": draw(inner, size), "up_proj": draw(inner, size)}
        own |= {"ff_out": draw(size, inner), "attn_norm": 1 + draw(size), "ff_norm": 1 + draw(size)}
        tensors |= {f"blocks.{layer}.{name}": tensor for name, tensor in own.items()}
    named = {f"model.transformer.{name}.weight": tensor for name, tensor in tensors.items()}
    save_file(named, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return DenseLLaDA(named, config)


WIDTHS = {"never sure": 0.1, "seldom sure": 0.3, "often sure": 0.8}
"""Of weights: the wider they are drawn, the more peaked logits are."""
THRESHOLDS = [0.2, 0.5, 0.9, 0.99, 2.0]


@pytest.fixture(scope="module")
def lladas(tmp_path_factory) -> dict[tuple[str, int], tuple[Path, DenseLLaDA]]:
    """Folder and dense model, by how sure they are and by seed."""
    made = {}
    for kind, width in WIDTHS.items():
        for seed in (3, 4):
            folder = tmp_path_factory.mktemp("llada")
            made[kind, seed] = folder, write_llada(folder, seed, width=width)
    return made


@pytest.fixture(params=[(kind, seed) for kind in WIDTHS for seed in (3, 4)], ids=str)
def llada(lladas, request) -> tuple[Path, DenseLLaDA]:
    return lladas[request.param]


@pytest.fixture
def one_llada(lladas) -> Path:
    return lladas["seldom sure", 3][0]


def by_threshold(
    dense: Any, prompt: list[int], threshold: float, cache: str, **options: Any
) -> Outcome:
    """What Fast-dLLM's loop says."""
    return fast_dllm_generate(
        dense.cached,
        prompt,
        mask_id=MASK,
        gen_length=ANSWER,
        block_length=8,
        rule=threshold_rule(threshold),
        cache=cache,
        **options,
    )


def test_thresholds_fire_never_seldom_or_often(lladas):
    """What the comparisons below are worth: no, some or many steps reveal more than one token."""
    shares = {kind: [] for kind in WIDTHS}
    for (kind, _), (_, dense) in lladas.items():
        prompts = make_prompts(random.Random(2), 5)
        outcomes = [
            by_threshold(dense, prompt, threshold, "none")
            for prompt, threshold in zip(prompts, THRESHOLDS, strict=True)
        ]
        num_parallel = sum(len(step) > 1 for one in outcomes for step in one.reveals)
        shares[kind].append(num_parallel / sum(one.nfe for one in outcomes))
    assert max(shares["never sure"]) == 0
    assert 0 < min(shares["seldom sure"]) <= max(shares["seldom sure"]) < 0.08
    assert min(shares["often sure"]) > 0.12


@pytest.mark.parametrize("flags", [{}, {"page_size": 8, "num_pages": 20, "token_budget": 96}])
def test_lladas_fixed_steps(llada, flags):
    folder, dense = llada
    rng = random.Random(1)
    prompts = make_prompts(rng, 5)
    asked = [rng.choice([(8, 24), (8, 12), (24, 24), (12, 6), (24, 5)]) for _ in prompts]
    knobs = [{"block_length": block, "steps": steps} for block, steps in asked]
    outputs, preemptions = run(make_engine(folder, **flags), prompts, ANSWER, knobs)
    for prompt, (block, steps), output in zip(prompts, asked, outputs, strict=True):
        sizes = {"gen_length": ANSWER, "block_length": block, "steps": steps}
        assert output == llada_generate(dense.logits, prompt, mask_id=MASK, **sizes).tokens
    assert preemptions == 0, "pages for the whole canvas are taken at admission"


def guided_outputs(folder: Path, **flags: object) -> tuple[list, list[tuple]]:
    """Guided requests among others, in one engine; tokens, and what each asked for."""
    rng = random.Random(3)
    prompts = make_prompts(rng, 6)
    asked = [(rng.choice([8, 24]), rng.choice([24, 12]), scale) for scale in (0, 0.5, 2, 0, 1, 4)]
    knobs = [
        {"remasking": "low_confidence", "block_length": b, "steps": s, "cfg_scale": scale}
        for b, s, scale in asked
    ]
    knobs[3] |= {"cache": "dual", "cfg_scale": 0}
    outputs, _ = run(make_engine(folder, **flags), prompts, ANSWER, knobs)
    return outputs, list(zip(prompts, asked, strict=True))


@pytest.mark.parametrize("flags", [{}, {"page_size": 8, "num_pages": 20, "token_budget": 160}])
def test_lladas_guidance(llada, flags):
    folder, dense = llada
    outputs, asked = guided_outputs(folder, **flags)
    for index, (prompt, (block, steps, scale)) in enumerate(asked):
        if index == 3:
            continue
        sizes = {"gen_length": ANSWER, "block_length": block, "steps": steps}
        wanted = llada_generate(dense.logits, prompt, mask_id=MASK, cfg_scale=scale, **sizes)
        assert outputs[index] == wanted.tokens
        if scale >= 2:
            plain = llada_generate(dense.logits, prompt, mask_id=MASK, **sizes)
            assert plain.tokens != wanted.tokens, "the control: guidance is seen"


def test_dreams_guidance_is_the_same_behind_steps_that_build_kernels(tmp_path, monkeypatch):
    """They run on the padding row, whose last mask is what copies read as their prompt."""
    write(Case(name="dream", kind="Qwen2", edit=as_dream), tmp_path, seed=5)
    prompts = make_prompts(random.Random(3), 3)
    scales = (0, 1.5, 4)
    knobs = [{"block_length": 8, "cfg_scale": scale} for scale in scales]
    plain, _ = run(make_engine(tmp_path), prompts, ANSWER, knobs)
    unguided, _ = run(make_engine(tmp_path), prompts, ANSWER, [knobs[0]] * 3)
    assert [one == other for one, other in zip(plain, unguided, strict=True)] == [
        True,
        False,
        False,
    ]
    monkeypatch.setattr(build_kernels, "runs_triton", lambda _: True)
    found, _ = run(make_engine(tmp_path), prompts, ANSWER, knobs)
    assert found == plain


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"cfg_scale": -1}, r"in \[0, 1e\+06\]"),
        ({"cfg_scale": 1e39}, r"in \[0, 1e\+06\]"),
        ({"cfg_scale": 1.5, "cache": "dual"}, "left out with cache dual"),
    ],
)
def test_guidance_that_cannot_be_is_refused(one_llada, knobs, words):
    with pytest.raises(InvalidRequest, match=words) as caught:
        run(make_engine(one_llada), [[1, 2]], ANSWER, [knobs])
    assert caught.value.param == "decoding.params.cfg_scale"


def test_guidance_takes_two_canvases_of_a_step(one_llada):
    with pytest.raises(InvalidRequest, match="needs 88 in one step, but --token-budget is 80"):
        run(make_engine(one_llada, token_budget=80), [[1] * 20], ANSWER, [{"cfg_scale": 1}])


@pytest.mark.parametrize("cache", ["none", "prefix", "dual"])
def test_fast_dllms_caches(llada, cache):
    folder, dense = llada
    prompts = make_prompts(random.Random(2), 5)
    knobs = [{"threshold": one, "cache": cache, "block_length": 8} for one in THRESHOLDS]
    flags = {"page_size": 8, "num_pages": 20, "token_budget": 96}
    outputs, _ = run(make_engine(folder, **flags), prompts, ANSWER, knobs)
    wanted = [
        by_threshold(dense, prompt, threshold, cache).tokens
        for prompt, threshold in zip(prompts, THRESHOLDS, strict=True)
    ]
    assert outputs == wanted


def as_dream(config: dict) -> None:
    """Dream's weights are Qwen2's."""
    config |= {"architectures": ["DreamModel"], "model_type": "Dream", "mask_token_id": MASK}


def test_dreams_schedules(tmp_path):
    dense = Dense(write(Case(name="dream", kind="Qwen2", edit=as_dream), tmp_path, seed=5))
    prompts = make_prompts(random.Random(4), 4)
    algorithms = ["maskgit_plus", "topk_margin", "entropy", "entropy"]
    steps = [24, 9, 5, 24]
    knobs = [
        {"remasking": alg, "steps": count, "block_length": ANSWER}
        for alg, count in zip(algorithms, steps, strict=True)
    ]
    outputs, _ = run(make_engine(tmp_path), prompts, ANSWER, knobs)
    for prompt, alg, count, output in zip(prompts, algorithms, steps, outputs, strict=True):
        wanted = dream_sample(
            lambda ids: dense.dense(ids[0].tolist(), 1 << 30)[None],
            prompt,
            mask_id=MASK,
            gen_length=ANSWER,
            steps=count,
            alg=alg,
        )
        assert output == wanted.tokens


def test_a_canvas_longer_than_a_step_is_refused(one_llada):
    engine = make_engine(one_llada, token_budget=40)
    with pytest.raises(InvalidRequest, match="--token-budget is 40"):
        run(engine, [[1] * 20], ANSWER)

"""Embeddings of a decoder: the engine as it ships against transformers' hidden states."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch

from engine_service.core.messages import Abort, FinishReason
from engine_service.core.params import PoolChoice
from tests.equivalence.pooling import Outcome, make_engine, pool_reference, run, step, submit
from tests.equivalence.shapes import SHAPES
from tests.models.checkpoints import SIZES, Case, write
from tidemill.runtime.errors import InvalidRequest, Unsupported

VOCAB, WIDTH = SIZES["vocab_size"], SIZES["hidden_size"]
KINDS = ("mean", "last", "cls")
CLOSE = 2e-5

SETUPS = {
    "whole": {"page_size": 16},
    "chunks": {"page_size": 8, "token_budget": 7, "logit_budget": 7},
    "pages": {"page_size": 8, "num_pages": 13, "token_budget": 24},
    "uncached": {"page_size": 4, "token_budget": 16, "prefix_caching": False},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Folder and transformers' model of a tiny Qwen3."""
    folder = tmp_path_factory.mktemp("qwen3")
    case = Case(name="qwen3", kind="Qwen3", options={"head_dim": 16})
    return folder, write(case, folder, seed=5)


@torch.no_grad()
def states_of(model, prompt: list[int]) -> torch.Tensor:
    """[T, E] behind the last norm."""
    return model.model(torch.tensor([prompt])).last_hidden_state[0]


def prompts_of(rng: random.Random, count: int) -> list[list[int]]:
    """Half of them begin alike, so that pages could be shared."""
    shared = [rng.randrange(VOCAB) for _ in range(24)]
    own = [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 40))] for _ in range(count)]
    return [shared + one if index % 2 else one for index, one in enumerate(own)]


@pytest.mark.parametrize("setup", SETUPS)
@pytest.mark.parametrize("seed", [0, 1])
def test_pools_as_transformers_does(checkpoint, setup, seed):
    folder, model = checkpoint
    engine, rng = make_engine(folder, **SETUPS[setup]), random.Random(seed)
    prompts, choices = prompts_of(rng, 12), []
    for key, prompt in enumerate(prompts):
        choice = PoolChoice(
            kind=rng.choice(KINDS),
            normalize=rng.choice((True, False)),
            dimensions=rng.choice((None, 1, 24, WIDTH)),
        )
        choices.append(choice)
        submit(engine, key, prompt, choice)
    outcome = run(engine)
    for key, (prompt, choice) in enumerate(zip(prompts, choices, strict=True)):
        expected = pool_reference(
            states_of(model, prompt),
            choice.kind,
            normalize=choice.normalize,
            dimensions=choice.dimensions,
        )
        np.testing.assert_allclose(outcome.vector(key), expected, atol=CLOSE)
        usage = outcome.finishes[key].usage
        assert outcome.finishes[key].reason is FinishReason.STOP, "nothing of it was cut"
        assert (usage.prompt_tokens, usage.output_tokens) == (len(prompt), 0)
        assert usage.cached_tokens == 0 or choice.kind == "last"
    assert not any(outcome.tokens.values())
    if setup == "chunks":
        assert max(finish.usage.forward_passes for finish in outcome.finishes.values()) > 5
    if setup == "pages":
        assert outcome.num_steps > 3


def as_sdar(config: dict) -> None:
    config |= {"architectures": ["SDARForCausalLM"], "model_type": "sdar"}
    config |= {"block_size": BLOCK, "mask_token_id": 3}


def as_dream(config: dict) -> None:
    config |= {"architectures": ["DreamModel"], "model_type": "Dream", "mask_token_id": 3}


BLOCK = 8
DIFFUSION = {
    "sdar": (Case(name="sdar", kind="Qwen3", options={"head_dim": 16}, edit=as_sdar), BLOCK),
    "dream": (Case(name="dream", kind="Qwen2", edit=as_dream), 1 << 20),
}


@pytest.mark.parametrize("name", DIFFUSION)
@pytest.mark.parametrize("flags", [{}, {"token_budget": 48, "page_size": 4}])
def test_diffusion_models_pool_what_their_masks_let_them_see(tmp_path, name, flags):
    case, block = DIFFUSION[name]
    model, rng = write(case, tmp_path, seed=5), random.Random(2)
    engine = make_engine(tmp_path, **{"max_model_len": 48, **flags})
    prompts = [prompt[:48] for prompt in prompts_of(rng, 9)]
    for key, prompt in enumerate(prompts):
        submit(engine, key, prompt, PoolChoice(kind=KINDS[key % 3]))
    outcome = run(engine)
    for key, prompt in enumerate(prompts):
        places = torch.arange(len(prompt))
        seen = places[None, :] < (places[:, None] // block + 1) * block
        mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
        with torch.no_grad():
            answer = model.model(torch.tensor([prompt]), attention_mask=mask[None, None])
        wanted = pool_reference(answer.last_hidden_state[0], KINDS[key % 3])
        np.testing.assert_allclose(outcome.vector(key), wanted, atol=CLOSE)


def test_a_checkpoint_without_a_head_or_its_prefix(checkpoint, tmp_path):
    """As embedding models are published: the decoder alone, tied, under bare names."""
    model = checkpoint[1].model
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config |= {"architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True}
    path.write_text(json.dumps(config))
    engine = make_engine(tmp_path)
    submit(engine, 1, [5, 6, 7], PoolChoice())
    wanted = pool_reference(states_of(checkpoint[1], [5, 6, 7]), "last")
    np.testing.assert_allclose(run(engine).vector(1), wanted, atol=CLOSE)


def test_the_reference_tells_kinds_apart(checkpoint):
    """The control: other kinds, prompts and lengths are further away than what we allow."""
    states = states_of(checkpoint[1], list(range(1, 30)))
    right = pool_reference(states, "mean")
    for wrong in (
        pool_reference(states, "last"),
        pool_reference(states, "cls"),
        pool_reference(states[1:], "mean"),
        pool_reference(states[:-1], "mean"),
        pool_reference(states, "mean", normalize=False),
    ):
        assert np.abs(right - wrong).max() > 50 * CLOSE


@pytest.mark.parametrize("overlaps", [False, True])
def test_generating_neighbours_do_not_notice(checkpoint, overlaps):
    folder, model = checkpoint
    rng = random.Random(3)
    prompts = prompts_of(rng, 8)
    flags = {"page_size": 8, "token_budget": 24}
    alone = make_engine(folder, **flags)
    for key, prompt in enumerate(prompts):
        submit(alone, key, prompt, None)
    expected = run(alone).tokens
    engine = make_engine(folder, **flags)
    for key, prompt in enumerate(prompts):
        submit(engine, key, prompt, None)
        submit(engine, 100 + key, prompt, PoolChoice(kind=KINDS[key % 3]))
    outcome = run(engine, Outcome(overlaps=overlaps))
    assert {key: outcome.tokens[key] for key in expected} == expected
    for key, prompt in enumerate(prompts):
        wanted = pool_reference(states_of(model, prompt), KINDS[key % 3])
        np.testing.assert_allclose(outcome.vector(100 + key), wanted, atol=CLOSE)


def test_cached_prefixes_serve_the_last_position_only(checkpoint):
    folder, model = checkpoint
    engine, prompt = make_engine(folder, page_size=8), list(range(40))
    submit(engine, 1, prompt, None)
    run(engine)
    for key, (kind, cached) in enumerate((("last", 32), ("mean", 0), ("cls", 0)), start=2):
        submit(engine, key, prompt, PoolChoice(kind=kind))
        outcome = run(engine)
        assert outcome.finishes[key].usage.cached_tokens == cached
        wanted = pool_reference(states_of(model, prompt), kind)
        np.testing.assert_allclose(outcome.vector(key), wanted, atol=CLOSE)


def test_pooled_prompts_are_cached_for_others(checkpoint):
    engine, prompt = make_engine(checkpoint[0], page_size=8), list(range(40))
    submit(engine, 1, prompt, PoolChoice(kind="mean"))
    run(engine)
    submit(engine, 2, prompt, None)
    assert run(engine).finishes[2].usage.cached_tokens == 32


@pytest.mark.parametrize("kind", KINDS)
def test_preempted_prompts_are_pooled_anew(checkpoint, kind):
    folder, model = checkpoint
    engine, prompt, outcome = make_engine(folder, token_budget=8), list(range(50)), Outcome()
    submit(engine, 1, prompt, PoolChoice(kind=kind))
    for _ in range(3):
        step(engine, outcome)
    planner = engine.scheduler.planner
    (request,) = planner._running.values()
    assert 0 < request.num_cached < len(prompt)
    planner._preempt(request)
    run(engine, outcome)
    assert outcome.finishes[1].usage.preemptions == 1
    wanted = pool_reference(states_of(model, prompt), kind)
    np.testing.assert_allclose(outcome.vector(1), wanted, atol=CLOSE)


def test_an_aborted_prompt_leaves_nothing(checkpoint):
    folder, model = checkpoint
    engine, outcome = make_engine(folder, token_budget=8), Outcome()
    submit(engine, 1, list(range(50)), PoolChoice(kind="mean"))
    step(engine, outcome)
    assert engine.scheduler.load.pages_used > 0
    engine.scheduler.abort(Abort(1))
    # The row is taken again, with whatever sum the first left in it.
    submit(engine, 2, list(range(7)), PoolChoice(kind="mean"))
    run(engine, outcome)
    assert outcome.finishes[1].vector == b""
    wanted = pool_reference(states_of(model, list(range(7))), "mean")
    np.testing.assert_allclose(outcome.vector(2), wanted, atol=CLOSE)


def test_the_whole_context_may_be_pooled(checkpoint):
    engine = make_engine(checkpoint[0])
    submit(engine, 1, [3] * 96, PoolChoice())
    assert len(run(engine).vector(1)) == WIDTH
    with pytest.raises(InvalidRequest, match="maximum context length is 96") as refused:
        submit(engine, 2, [3] * 97, PoolChoice())
    assert refused.value.reason == "CONTEXT_LENGTH_EXCEEDED"


@pytest.mark.parametrize(
    ("choice", "prompt", "kind", "param"),
    [
        (PoolChoice(dimensions=WIDTH + 1), [1], InvalidRequest, "dimensions"),
        (PoolChoice(dimensions=0), [1], InvalidRequest, "dimensions"),
        (PoolChoice(kind="max"), [1], InvalidRequest, "pooling"),
        (PoolChoice(), [], InvalidRequest, "prompt_token_ids"),
        (PoolChoice(), [VOCAB], InvalidRequest, "prompt_token_ids"),
        (PoolChoice(task="score"), [1], Unsupported, "task"),
        (PoolChoice(task="classify"), [1], Unsupported, "task"),
    ],
)
def test_what_cannot_be_pooled_is_refused_by_name(checkpoint, choice, prompt, kind, param):
    engine = make_engine(checkpoint[0])
    with pytest.raises(kind) as refused:
        submit(engine, 1, prompt, choice)
    assert refused.value.param == param
    assert not engine.scheduler.has_work


def test_a_model_whose_blocks_choose_experts_pools_nothing(tmp_path):
    """Texts end inside of blocks, whose other tokens would be another request's."""
    by_block = SHAPES["llada2-moe"].config | {"expert_capacity": 4, "block_size": 8}
    (tmp_path / "config.json").write_text(json.dumps(by_block))
    engine = make_engine(tmp_path, load_format="dummy")
    with pytest.raises(Unsupported, match="chooses experts for whole blocks"):
        submit(engine, 1, [1, 2, 3], PoolChoice())


def test_without_a_model_there_is_nothing_to_pool():
    engine = make_engine("demo", executor="simulated", simulated_step_ms=0.0)
    with pytest.raises(Unsupported, match="simulated") as refused:
        submit(engine, 1, [1], PoolChoice())
    assert refused.value.param == "task"

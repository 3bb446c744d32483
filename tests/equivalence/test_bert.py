"""BERT as an encoder and as a cross-encoder: the engine as it ships against transformers."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch

from engine_service.core.messages import Abort
from engine_service.core.params import PoolChoice
from engine_service.worker.buckets import buckets_of
from tests.equivalence.pooling import Outcome, make_engine, pool_reference, run, step, submit
from tests.models.encoders import SIZES, write
from tidemill.runtime.errors import InvalidRequest, Unsupported

CLOSE = 1e-5
FLAGS = {"max_model_len": 64}


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bert")
    return folder, write(folder, "BertModel")


@torch.no_grad()
def states_of(model, prompt: list[int], pair_start: int | None = None) -> torch.Tensor:
    types = [int(pair_start is not None and i >= pair_start) for i in range(len(prompt))]
    ids, types = torch.tensor([prompt]), torch.tensor([types])
    return model(ids, token_type_ids=types).last_hidden_state[0]


def prompts_of(rng: random.Random, count: int) -> list[list[int]]:
    sizes = [1, 2, 64, *(rng.randint(3, 60) for _ in range(count - 3))]
    return [[rng.randrange(SIZES["vocab_size"]) for _ in range(size)] for size in sizes]


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("flags", [{}, {"token_budget": 64, "max_rows": 3}, {"page_size": 4}])
def test_hidden_states_of_many_lengths_at_once(encoder, seed, flags):
    folder, model = encoder
    engine, rng = make_engine(folder, **FLAGS | flags), random.Random(seed)
    prompts = prompts_of(rng, 14)
    choices = [
        PoolChoice(kind=rng.choice(("mean", "cls", "last", None)), normalize=rng.random() < 0.5)
        for _ in prompts
    ]
    for key, (prompt, choice) in enumerate(zip(prompts, choices, strict=True)):
        submit(engine, key, prompt, choice)
    outcome = run(engine)
    for key, (prompt, choice) in enumerate(zip(prompts, choices, strict=True)):
        wanted = pool_reference(
            states_of(model, prompt), choice.kind or "mean", normalize=choice.normalize
        )
        np.testing.assert_allclose(outcome.vector(key), wanted, atol=CLOSE, rtol=1e-5)
        assert outcome.finishes[key].usage.forward_passes == 1
    assert outcome.num_steps < len(prompts)


@pytest.mark.parametrize("options", [{"hidden_act": "gelu_new"}, {"hidden_act": "relu"}])
def test_options(tmp_path, options):
    model = write(tmp_path, "BertModel", seed=2, **options)
    engine, prompt = make_engine(tmp_path, **FLAGS), list(range(20))
    submit(engine, 1, prompt, PoolChoice(normalize=False))
    wanted = pool_reference(states_of(model, prompt), "mean", normalize=False)
    np.testing.assert_allclose(run(engine).vector(1), wanted, atol=CLOSE, rtol=1e-5)


def test_a_second_text_has_a_segment_of_its_own(encoder):
    folder, model = encoder
    engine, prompt = make_engine(folder, **FLAGS), list(range(3, 33))
    for key, start in enumerate((None, 1, 12, 29)):
        submit(engine, key, prompt, PoolChoice(pair_start=start))
    outcome = run(engine)
    for key, start in enumerate((None, 1, 12, 29)):
        wanted = pool_reference(states_of(model, prompt, start), "mean")
        np.testing.assert_allclose(outcome.vector(key), wanted, atol=CLOSE)
    # The control: where it starts matters.
    assert np.abs(outcome.vector(0) - outcome.vector(2)).max() > 100 * CLOSE
    with pytest.raises(InvalidRequest, match="pair_start"):
        submit(engine, 9, prompt, PoolChoice(pair_start=30))


@pytest.mark.parametrize("labels", [1, 3])
@pytest.mark.parametrize("named", ["", "linear.Identity", "activation.Sigmoid"])
@pytest.mark.parametrize("beside", [False, True])
def test_cross_encoder(tmp_path, labels, named, beside):
    """`beside`: the activation stands where sentence-transformers writes it from 5.4 on."""
    model = write(tmp_path, "BertForSequenceClassification", seed=4, num_labels=labels)
    told = {"activation_fn": f"torch.nn.modules.{named}"}
    if named and beside:
        newer = {**told, "model_type": "CrossEncoder"}
        (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(newer))
        told = {"version": "5.4"}
    if named:
        path = tmp_path / "config.json"
        config = json.loads(path.read_text()) | {"sentence_transformers": told}
        path.write_text(json.dumps(config))
    engine, rng = make_engine(tmp_path, **FLAGS), random.Random(1)
    prompts = [p for p in prompts_of(rng, 9) if len(p) > 1]
    starts = [rng.randint(1, len(prompt) - 1) for prompt in prompts]
    task = "score" if labels == 1 else "classify"
    for key, (prompt, start) in enumerate(zip(prompts, starts, strict=True)):
        submit(engine, key, prompt, PoolChoice(task=task, pair_start=start))
        submit(engine, 100 + key, prompt, PoolChoice(dimensions=7))
    outcome = run(engine)
    for key, (prompt, start) in enumerate(zip(prompts, starts, strict=True)):
        types = torch.tensor([[int(i >= start) for i in range(len(prompt))]])
        with torch.no_grad():
            wanted = model(torch.tensor([prompt]), token_type_ids=types).logits[0]
        if named.endswith("Sigmoid") or (not named and labels == 1):
            wanted = wanted.sigmoid()
        elif not named:
            wanted = wanted.softmax(-1)
        np.testing.assert_allclose(outcome.vector(key), wanted.numpy(), atol=CLOSE, rtol=1e-5)
        states = states_of(model.bert, prompt)
        embedded = pool_reference(states, "mean", dimensions=7)
        np.testing.assert_allclose(outcome.vector(100 + key), embedded, atol=CLOSE)
    if labels > 1:
        with pytest.raises(Unsupported, match="of one label") as refused:
            submit(engine, 500, [1, 2], PoolChoice(task="score"))
        assert refused.value.param == "task"


def test_an_encoder_generates_nothing_and_says_so(encoder):
    engine = make_engine(encoder[0], **FLAGS)
    with pytest.raises(Unsupported, match="BertModel is an encoder") as refused:
        submit(engine, 1, [1, 2], None)
    assert refused.value.param == "model"
    assert engine.facts.methods == ()
    assert buckets_of(engine.executor.traits, engine.executor.resolved, (), False) == []
    assert engine.facts.num_pages == 0
    with pytest.raises(InvalidRequest, match="maximum context length is 64"):
        submit(engine, 1, [1] * 65, PoolChoice())


def test_a_prompt_that_no_step_holds_is_refused(encoder):
    engine = make_engine(encoder[0], **FLAGS, token_budget=32)
    with pytest.raises(InvalidRequest, match="--token-budget"):
        submit(engine, 1, [1] * 33, PoolChoice())
    submit(engine, 2, [1] * 32, PoolChoice())
    assert len(run(engine).vector(2)) == SIZES["hidden_size"]


def test_an_aborted_prompt_is_gone(encoder):
    engine, outcome = make_engine(encoder[0], **FLAGS, max_rows=1), Outcome()
    submit(engine, 1, [1, 2, 3], PoolChoice())
    submit(engine, 2, [4, 5], PoolChoice())
    engine.scheduler.abort(Abort(1))
    step(engine, outcome)
    run(engine, outcome)
    assert outcome.finishes[1].vector == b""
    assert len(outcome.vector(2)) == SIZES["hidden_size"]


@pytest.mark.parametrize(
    ("flags", "param"),
    [({"num_pages": 4}, "num_pages"), ({"default_method": "autoregressive"}, "default_method"),
     ({"default_params": {"threshold": 1}}, "default_params")],
)  # fmt: skip
def test_flags_of_generators_are_refused(encoder, flags, param):
    with pytest.raises(InvalidRequest) as refused:
        make_engine(encoder[0], **FLAGS, **flags)
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("change", "said"),
    [({"position_embedding_type": "relative_key"}, "position_embedding_type"),
     ({"hidden_act": "swish"}, "hidden_act"), ({"is_decoder": True}, "is_decoder")],
)  # fmt: skip
def test_variants_are_refused_at_load(tmp_path, change, said):
    write(tmp_path, "BertModel")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(Unsupported, match=said):
        make_engine(tmp_path, **FLAGS)


def test_an_activation_that_is_not_known_is_refused_at_load(tmp_path):
    write(tmp_path, "BertForSequenceClassification", num_labels=1)
    path = tmp_path / "config.json"
    told = {"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Tanh"}}
    path.write_text(json.dumps(json.loads(path.read_text()) | told))
    with pytest.raises(Unsupported, match="Tanh"):
        make_engine(tmp_path, **FLAGS)


def modules(folder, *kinds: str, **mode: object) -> None:
    """The files that sentence-transformers writes."""
    listed = [{"idx": i, "path": f"{i}_{k}", "type": f"st.models.{k}"} for i, k in enumerate(kinds)]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(mode))


@pytest.mark.parametrize(
    "mode",
    [
        {"pooling_mode_cls_token": True},
        {"pooling_mode": "cls"},
        {
            "pooling_mode": ["cls"],
            "pooling_mode_cls_token": True,
            "pooling_mode_mean_tokens": False,
        },
    ],
)
def test_the_checkpoint_says_how_to_pool(tmp_path, mode):
    """As sentence-transformers wrote it before 5.4, and as it writes it since."""
    model = write(tmp_path, "BertModel", seed=3)
    modules(tmp_path, "Transformer", "Pooling", "Normalize", **mode)
    engine, prompt = make_engine(tmp_path, **FLAGS), list(range(9))
    submit(engine, 1, prompt, PoolChoice())
    wanted = pool_reference(states_of(model, prompt), "cls")
    np.testing.assert_allclose(run(engine).vector(1), wanted, atol=CLOSE)


@pytest.mark.parametrize(
    ("kinds", "mode", "said"),
    [(("Transformer", "Pooling", "Dense"), "pooling_mode_mean_tokens", "Dense"),
     (("Transformer", "Pooling"), "pooling_mode_max_tokens", "pooling_mode_max_tokens"),
     (("Transformer", "Pooling"), {"pooling_mode": "max"}, "pooling_mode max"),
     (("Transformer", "Pooling"), {"pooling_mode": ["mean", "cls"]}, "pooling_mode_cls_token")],
)  # fmt: skip
def test_what_is_not_computed_is_refused(tmp_path, kinds, mode, said):
    write(tmp_path, "BertModel")
    modules(tmp_path, *kinds, **(mode if isinstance(mode, dict) else {mode: True}))
    engine = make_engine(tmp_path, **FLAGS)
    with pytest.raises(Unsupported, match=said):
        submit(engine, 1, [1], PoolChoice())

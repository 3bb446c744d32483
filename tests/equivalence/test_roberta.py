"""RoBERTa and XLM-RoBERTa as encoders and as classifiers: the engine as it ships against
transformers."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from engine_service.core.params import PoolChoice
from tests.equivalence.pooling import make_engine, pool_reference, run, submit
from tests.models.encoders import SIZES, write
from tidemill.runtime.errors import InvalidRequest

CLOSE = 1e-5
PADDING = 1
ROOM = SIZES["max_position_embeddings"] - PADDING - 1


def prompts_of(rng: random.Random, count: int) -> list[list[int]]:
    """Without the padding's id, which transformers does not count as a position."""
    sizes = [1, ROOM, *(rng.randint(2, ROOM) for _ in range(count - 2))]
    return [[rng.randrange(PADDING + 1, SIZES["vocab_size"]) for _ in range(n)] for n in sizes]


@pytest.mark.parametrize("kind", ["RobertaModel", "XLMRobertaModel"])
@pytest.mark.parametrize("segments", [1, 2])
def test_hidden_states(tmp_path, kind, segments, seed):
    model = write(tmp_path, kind, seed=5, type_vocab_size=segments, layer_norm_eps=1e-5)
    engine = make_engine(tmp_path, max_model_len=ROOM)
    prompts = prompts_of(random.Random(seed), 9)
    for key, prompt in enumerate(prompts):
        submit(engine, key, prompt, PoolChoice(kind="mean"))
        if len(prompt) > 1:
            submit(engine, 100 + key, prompt, PoolChoice(kind="mean", pair_start=1))
    outcome = run(engine)
    for key, prompt in enumerate(prompts):
        with torch.no_grad():
            states = model(torch.tensor([prompt])).last_hidden_state[0]
        wanted = pool_reference(states, "mean")
        np.testing.assert_allclose(outcome.vector(key), wanted, atol=CLOSE, rtol=1e-5)
        if len(prompt) > 1:
            np.testing.assert_allclose(outcome.vector(100 + key), wanted, atol=CLOSE)


def test_positions_begin_behind_the_padding(tmp_path):
    """The table of positions has two rows that no token has."""
    write(tmp_path, "RobertaModel")
    with pytest.raises(InvalidRequest, match="max_model_len"):
        make_engine(tmp_path, max_model_len=ROOM + 1)
    other = write(tmp_path, "RobertaModel", pad_token_id=0)
    engine, prompt = make_engine(tmp_path, max_model_len=ROOM + 1), list(range(2, 22))
    submit(engine, 1, prompt, PoolChoice())
    with torch.no_grad():
        states = other(torch.tensor([prompt])).last_hidden_state[0]
    np.testing.assert_allclose(run(engine).vector(1), pool_reference(states, "mean"), atol=CLOSE)


@pytest.mark.parametrize(
    "kind", ["RobertaForSequenceClassification", "XLMRobertaForSequenceClassification"]
)
@pytest.mark.parametrize("labels", [1, 3])
def test_classifiers(tmp_path, kind, labels, seed):
    model = write(tmp_path, kind, seed=6, num_labels=labels)
    engine = make_engine(tmp_path, max_model_len=ROOM)
    prompts = prompts_of(random.Random(seed), 7)
    task = "score" if labels == 1 else "classify"
    for key, prompt in enumerate(prompts):
        submit(engine, key, prompt, PoolChoice(task=task))
    outcome = run(engine)
    for key, prompt in enumerate(prompts):
        with torch.no_grad():
            logits = model(torch.tensor([prompt])).logits[0]
        wanted = logits.sigmoid() if labels == 1 else logits.softmax(-1)
        np.testing.assert_allclose(outcome.vector(key), wanted.numpy(), atol=CLOSE, rtol=1e-5)

"""Dream equals Qwen2's weights with nothing hidden from a position."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine_service.core.step import FULL
from engine_service.models.base import REGISTRY, CausalModel, ModelTraits
from tests.models.checkpoints import Case, load, write
from tests.models.paged import PagedRunner, PageTable, causal
from tidemill.runtime.errors import InvalidRequest, Unsupported

MASK = 319
TOLERANCE = 1e-4
CONFIG: dict[str, Any] = {
    "architectures": ["DreamModel"],
    "model_type": "Dream",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 152064,
    "max_position_embeddings": 512,
    "rope_theta": 1e6,
    "use_sliding_window": False,
    "eos_token_id": 151643,
}


def build(folder: Path, seed: int) -> tuple[transformers.PreTrainedModel, CausalModel]:
    def as_dream(config: dict[str, Any]) -> None:
        config["architectures"] = ["DreamModel"]
        config["model_type"] = "Dream"
        config["mask_token_id"] = MASK

    case = Case(name="dream", kind="Qwen2", edit=as_dream)
    return write(case, folder, seed), load(folder)


def dense(theirs: transformers.PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """[L, V] with every position seeing all."""
    everything = torch.zeros(1, 1, len(ids), len(ids))
    with torch.inference_mode():
        return theirs(ids[None], attention_mask=everything).logits[0]


def traits(added: dict[str, int] | None = None, **changes: Any) -> ModelTraits:
    config = CONFIG | changes
    return REGISTRY.find(config).read_traits(config, added or {})


def worst(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).abs().max() / want.abs().max())


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_logits(backend: str, tmp_path: Path, seed: int) -> None:
    theirs, ours = build(tmp_path, seed)
    rows = [torch.randint(0, MASK, (length,)) for length in (21, 9, 1)]
    rows[0][10:] = MASK
    runner = PagedRunner(ours, backend, PageTable(3, 21, 4, seed))
    spans = [causal(index, 0, len(row), FULL) for index, row in enumerate(rows)]
    for got, row in zip(runner.logits(rows, spans), rows, strict=True):
        assert worst(got, dense(theirs, row)) < TOLERANCE


def test_a_causal_mask_shows(tmp_path: Path, seed: int) -> None:
    """Negative control."""
    theirs, ours = build(tmp_path, seed)
    row = torch.randint(0, MASK, (21,))
    runner = PagedRunner(ours, "sdpa", PageTable(1, 21, 4, seed))
    (got,) = runner.logits([row], [causal(0, 0, 21)])
    assert worst(got, dense(theirs, row)) > 5 * TOLERANCE


def test_traits(tmp_path: Path, seed: int) -> None:
    got = build(tmp_path, seed)[1].traits
    assert (got.mask_block, got.mask_token_id, got.logits_shift) == (FULL, MASK, 1)
    assert (got.default_method, got.methods) == ("full_canvas", ("full_canvas",))
    assert got.architecture == "DreamModel"


@pytest.mark.parametrize(
    ("changes", "added", "mask"),
    [
        ({"mask_token_id": 3}, {"<|mask|>": 5}, 3),
        ({}, {"<|mask|>": 5}, 5),
        ({}, {"<|MASK|>": 6}, 6),
        ({}, {}, 151666),
    ],
)
def test_mask_token(changes: dict[str, Any], added: dict[str, int], mask: int) -> None:
    assert traits(added, **changes).mask_token_id == mask


def test_no_mask_token_in_a_small_vocabulary_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"151666.*vocabulary size 1000"):
        traits(vocab_size=1000)


def test_a_window_is_refused() -> None:
    with pytest.raises(Unsupported, match="use_sliding_window") as caught:
        traits(use_sliding_window=True)
    assert caught.value.param == "use_sliding_window"

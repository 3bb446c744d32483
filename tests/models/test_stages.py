"""A stage holds its layers and nothing else; what cannot be split is refused before loading."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from engine_service.composition import compose
from engine_service.config import EngineConfig
from engine_service.distributed import Group
from engine_service.models.base import REGISTRY
from engine_service.stages import Stage
from tests.equivalence.shapes import SHAPES
from tests.equivalence.test_shards import load, make_source, shard
from tidemill.runtime.errors import InvalidRequest, Unsupported

BERT = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "vocab_size": 60,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
    "hidden_act": "gelu",
}


@pytest.mark.parametrize("name", list(SHAPES))
def test_stages_hold_everything_once(name: str) -> None:
    """But for a matrix that embeds and decides: both ends have it."""
    kind = REGISTRY.find(SHAPES[name].config)
    traits = kind.read_traits(SHAPES[name].config, {})
    where = {"device": torch.device("cpu"), "dtype": torch.float32}
    parts = [
        kind.create(
            traits, SHAPES[name].config, **where, group=Group(stage=Stage(index, 3))
        ).weight_slots()
        for index in range(3)
    ]
    whole = kind.create(traits, SHAPES[name].config, **where).weight_slots()
    twice = 0
    for tensor, slot in whole.items():
        assert {part[tensor].shape for part in parts} == {slot.shape}
        holders = [part for part in parts if part[tensor].nbytes]
        assert {part[tensor].nbytes for part in holders} == {slot.nbytes}
        twice += len(holders) - 1
    assert twice == traits.tie_embeddings


@pytest.mark.parametrize("name", ["qwen3-tied", "mixtral", "llada"])
def test_stages_read_their_layers_from_files(tmp_path: Path, name: str, seed: int) -> None:
    """Also from those that were cut for two ranks and hold all layers."""
    source = make_source(tmp_path / "source", SHAPES[name].config, seed)
    folders = {1: source, 2: shard(source, 2)}
    for size, rank, index in [(1, 0, 0), (1, 0, 1), (2, 0, 0), (2, 1, 1)]:
        whole = load(source, Group(rank, size)).weight_slots()
        staged = load(folders[size], Group(rank, size, Stage(index, 2))).weight_slots()
        for tensor, slot in staged.items():
            for piece, wanted in zip(slot.pieces, whole[tensor].pieces, strict=False):
                assert torch.equal(piece.view, wanted.view), tensor
        assert 0 < sum(bool(slot.pieces) for slot in staged.values()) < len(whole)


def refusal(folder: Path, config: dict[str, object], num_stages: int) -> Exception:
    (folder / "config.json").write_text(json.dumps(config))
    asked = EngineConfig(
        model=str(folder), device="cpu", load_format="dummy", pipeline_parallel_size=num_stages
    )
    with pytest.raises((InvalidRequest, Unsupported)) as caught:
        compose(asked, lambda *stage: None)
    assert caught.value.param == "pipeline_parallel_size"
    return caught.value


@pytest.mark.parametrize("num_stages", [0, 4])
def test_stages_without_layers_are_refused(tmp_path: Path, num_stages: int) -> None:
    told = str(refusal(tmp_path, SHAPES["qwen3"].config, num_stages))
    assert "has 3 layers" in told
    assert "pass 1 to 3" in told


def test_encoders_are_refused(tmp_path: Path) -> None:
    assert "pass 1, and one engine per GPU" in str(refusal(tmp_path, BERT, 2))

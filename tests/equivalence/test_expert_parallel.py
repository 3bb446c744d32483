"""Experts that are held whole, by a rank each: the same tokens in float32, the same weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_service.config import EngineConfig
from engine_service.distributed import ALONE, Group
from engine_service.layers.ahead import Ahead
from engine_service.models.base import CausalModel
from engine_service.place import Place
from engine_service.rank_worker import make_strategies
from engine_service.worker.worker import Worker
from tests.equivalence.shapes import GREEDY, SHAPES
from tests.equivalence.test_shards import differing, load, make_source, shard
from tests.equivalence.test_tensor_parallel import answers, make_cases
from tidemill.runtime.errors import InvalidRequest

NAMES = ["mixtral", "qwen3-moe", "bailing-moe-v2", "sdar-moe", "llada-moe", "llada2-moe"]


def eight(name: str) -> dict[str, Any]:
    """The architecture with a number of experts that four ranks can share."""
    config = SHAPES[name].config
    key = next(key for key in ("num_local_experts", "num_experts") if key in config)
    return config | {key: 8}


def check_split(tmp_path: Path, sizes: tuple[tuple[int, int], ...], **flags: Any) -> None:
    """So many (ranks, stages) with experts of their own answer as one rank with all."""
    cases = make_cases(tmp_path, NAMES, **flags)
    alone, split = tmp_path / "alone", tmp_path / "split"
    for folder, whole_experts in ((alone, False), (split, True)):
        folder.mkdir()
        for name, case in zip(NAMES, cases, strict=True):
            (Path(case["config"]["model"]) / "config.json").write_text(json.dumps(eight(name)))
            case["config"]["expert_parallel"] = whole_experts
            few = {key: case[key][:2] for key in ("prompts", "knobs")}
            case |= few | {"sampling": [GREEDY] * 2, "count": 8}
        (folder / "cases.json").write_text(json.dumps(cases))
    one, *others = answers((alone, 1, 1), *((split, *group) for group in sizes))
    for group, several in zip(sizes, others, strict=True):
        together = dict(zip(NAMES, several, strict=True))
        assert together == dict(zip(NAMES, one, strict=True)), group
    assert all(len({tuple(tokens) for tokens in case}) > 1 for case in one), "nothing is decided"


@pytest.mark.timeout(600)
def test_two_and_four_ranks_answer_as_one(tmp_path: Path) -> None:
    check_split(tmp_path, ((2, 1), (4, 1), (4, 2)))


def rank_of(folder: Path, rank: int, size: int, **config: Any) -> CausalModel:
    return load(folder, Group(rank, size, whole_experts=True), **config)


def experts_of(model: CausalModel) -> Any:
    """Of the last layer."""
    return model._layers[-1].feed_forward  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", NAMES)
def test_parts_of_a_layer_add_up_to_it(tmp_path: Path, name: str, seed: int) -> None:
    """And without any rank's part, which is the control, they do not."""
    torch.manual_seed(seed)
    source = make_source(tmp_path / "source", eight(name), seed)
    whole = experts_of(load(source))
    # So many tokens that every rank has an expert which some of them choose.
    x = torch.randn(64, whole.down.shape[1])
    want = whole(torch.zeros_like(x), Ahead(x)).x_TE
    parts = []
    for rank in range(4):
        own = experts_of(rank_of(source, rank, 4))
        assert own.down.shape == (2, *whole.down.shape[1:])
        assert torch.equal(own.down, whole.down[2 * rank : 2 * rank + 2])
        own._group = ALONE  # what it would add to the sum
        parts.append(own(torch.zeros_like(x), Ahead(x)).x_TE)
    torch.testing.assert_close(sum(parts), want)
    for part in parts:
        assert not torch.allclose(sum(parts) - part, want)


@pytest.mark.parametrize("name", NAMES)
def test_random_weights_are_the_same_numbers(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(eight(name)))
    whole = load(tmp_path, load_format="dummy").weight_slots()
    filled = {key: torch.full(slot.shape, torch.nan) for key, slot in whole.items()}
    for rank in range(2):
        model = rank_of(tmp_path, rank, 2, load_format="dummy")
        for key, slot in model.weight_slots().items():
            for view, where in slot.pieces:
                filled[key][where or ...] = view
    for key, slot in whole.items():
        for view, where in slot.pieces:
            assert torch.equal(filled[key][where or ...], view), key


@pytest.mark.parametrize("name", NAMES)
def test_shards(tmp_path: Path, name: str, seed: int) -> None:
    """A rank's file has all of its experts and nothing of the others'."""
    source = make_source(tmp_path / "source", eight(name), seed)
    out = shard(source, 2, "--expert-parallel")
    for rank in range(2):
        group = Group(rank, 2, whole_experts=True)
        assert differing(load(out, group), load(source, group)) == []
    told = "size 2 and expert_parallel True.* has {} and False: pass {} 2 --expert-parallel, or"
    for size, param in ((1, "tensor_parallel_size"), (2, "expert_parallel")):
        told_now = told.format(size, "--tensor-parallel-size")
        with pytest.raises(InvalidRequest, match=told_now) as caught:
            load(out, Group(0, size))
        assert caught.value.param == param


@pytest.mark.parametrize(
    ("name", "size", "told"),
    [
        ("qwen3-moe", 4, "does not divide Qwen3MoeForCausalLM's 6 experts; pass 2$"),
        ("qwen3", 2, "Qwen3ForCausalLM has none: leave it out"),
        ("qwen3-moe", 1, "tensor_parallel_size is 1: leave it out"),
    ],
)
def test_what_cannot_be_split_is_refused(tmp_path: Path, name: str, size: int, told: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPES[name].config))
    config = EngineConfig(
        model=str(tmp_path),
        load_format="dummy",
        device="cpu",
        tensor_parallel_size=size,
        expert_parallel=True,
    )
    with pytest.raises(InvalidRequest, match=told):
        Worker(config, make_strategies, lambda *_: None, Place(0, size))

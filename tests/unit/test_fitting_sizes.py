"""Sizes that an error advises are sizes that the model, the machine and the hosts take."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
import torch

from engine_service.config import EngineConfig
from engine_service.distributed import Group
from engine_service.limits import MOST_RANKS
from engine_service.models.base import REGISTRY
from engine_service.models.sharing import check_fit
from engine_service.nodes import node_of
from engine_service.ranks.hosts import ThisHost
from engine_service.worker.device import pick_device
from tests.equivalence.shapes import SHAPES
from tidemill.runtime.errors import InvalidRequest

ROOM: dict[str, Any] = {"most_ranks": MOST_RANKS, "num_nodes": 1}


def message(name: str, size: int, stages: int = 1, *, experts: bool = False, **room: int) -> str:
    """Of the error of a split; empty where there is none."""
    config = SHAPES[name].config | {"num_hidden_layers": 64}
    group = Group(0, size, whole_experts=experts)
    traits = REGISTRY.find(config).read_traits(config, {})
    try:
        check_fit(config, traits, group, stages, **(ROOM | room))
    except InvalidRequest as error:
        return error.message
    return ""


@pytest.mark.parametrize("name", ["qwen3", "qwen3-moe", "fast-dllm", "mixtral"])
def test_exactly_what_is_advised_is_taken(name: str, seed: int) -> None:
    rng = random.Random(seed)
    advised = 0
    for _ in range(60):
        stages, nodes = rng.choice([1, 1, 2, 3, 8]), rng.choice([1, 1, 2, 3, 4])
        most, size = rng.choice([MOST_RANKS, 3, 8]), rng.randint(1, 12)
        told = message(name, size, stages, most_ranks=most, num_nodes=nodes)
        if not told:
            continue
        taken = [
            other
            for other in range(1, most // stages + 1)
            if other * stages % nodes == 0 and not message(name, other, stages)
        ]
        found = re.search(r"pass (?:one of )?([\d, ]+)$", told)
        assert [int(one) for one in found[1].split(", ")] == taken if found else not taken, told
        advised += bool(found)
    assert advised > 10


@pytest.mark.parametrize(
    ("size", "stages", "room", "told"),
    [
        (3, 1, {}, r"pass one of 1, 2, 4$"),
        (3, 1, {"most_ranks": 3}, r"pass one of 1, 2$"),
        (3, 1, {"num_nodes": 3}, r"with 3 nodes no size up to 64 ranks does: change that$"),
        (3, 32, {}, r"pass one of 1, 2$"),
        (3, 8, {"most_ranks": 4}, r"with --pipeline-parallel-size 8 no size up to 4 ranks does"),
    ],
)
def test_what_is_given_bounds_what_is_advised(
    size: int, stages: int, room: dict[str, int], told: str
) -> None:
    assert re.search(told, message("qwen3", size, stages, **room))


def test_shared_experts_take_two_ranks_or_more() -> None:
    assert message("qwen3-moe", 4, experts=True).endswith("6 experts; pass 2")
    no_size = message("qwen3-moe", 4, stages=40, experts=True)
    assert no_size.endswith(
        "with --pipeline-parallel-size 40 and --expert-parallel no size up to 64 ranks does: "
        "change that"
    )


@pytest.mark.parametrize(("stages", "multiple"), [(1, 6), (2, 3), (3, 2)])
def test_ranks_of_many_nodes_are_told_as_a_multiple(stages: int, multiple: int) -> None:
    given: dict[str, Any] = {"nnodes": 6, "leader_address": "a", "pipeline_parallel_size": stages}
    with pytest.raises(InvalidRequest, match=f"that is a multiple of {multiple},"):
        node_of(EngineConfig(**given), {})
    for times in (1, 2):
        node = node_of(EngineConfig(**given, tensor_parallel_size=times * multiple), {})
        assert node is not None
        assert len(node.ranks) * 6 == times * multiple * stages


def test_more_nodes_than_a_group_has_ranks() -> None:
    with pytest.raises(InvalidRequest, match="nnodes is 65; pass 1 to 64: a group has at most 64"):
        node_of(EngineConfig(nnodes=65, leader_address="a", tensor_parallel_size=65), {})


def test_gpus_bound_what_is_advised(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ThisHost(EngineConfig(device="cpu"), 3).most_ranks() == MOST_RANKS
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert ThisHost(EngineConfig(), 3).most_ranks() == 3
    assert ThisHost(EngineConfig(device="cuda:1"), 3).most_ranks() == 2
    with pytest.raises(InvalidRequest, match="local rank 3 has none: there are 3; run at most 3"):
        pick_device("cuda", 3)
    with pytest.raises(InvalidRequest, match=r"from cuda:1 on, and local rank 2 .* there are 2; "):
        pick_device("cuda:1", 2)

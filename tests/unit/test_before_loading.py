"""What cannot be loaded is refused before anything is: what is wrong, the limit, the remedy."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_service.composition import compose
from engine_service.config import EngineConfig
from engine_service.place import FIRST, Place
from engine_service.rank_worker import make_strategies, open_worker
from engine_service.ranks.group import open_group
from engine_service.ranks.hosts import SeveralHosts, ThisHost
from engine_service.worker.worker import Worker
from tests.unit.test_weights import CONFIG, random_tensors, shard, write
from tests.waiting import free_port
from tidemill.runtime.errors import InvalidRequest, NotFound, ServiceError


def refused(folder: Path, place: Place = FIRST) -> ServiceError:
    """By a worker that has got no further than reading what there is."""
    stages: list[str] = []
    config = EngineConfig(model=str(folder), device="cpu", tensor_parallel_size=place.size)
    with pytest.raises(ServiceError) as caught:
        Worker(config, make_strategies, lambda stage, *_: stages.append(stage), place)
    assert set(stages) == {"device", "checkpoint"}
    return caught.value


def missing(second: Path) -> None:
    second.unlink()


def truncated(second: Path) -> None:
    second.write_bytes(second.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("harm", "kind", "reason", "told"),
    [
        (missing, NotFound, "SHARD_MISSING", ("1 of 2", "fetch the checkpoint again")),
        (truncated, InvalidRequest, "CHECKPOINT_CORRUPT", ("bytes", "fetch the file again")),
    ],
)
@pytest.mark.parametrize("place", [FIRST, Place(1, 2, local_rank=1)])
def test_shards(
    tmp_path: Path,
    seed: int,
    harm: Callable[[Path], None],
    kind: type[ServiceError],
    reason: str,
    told: tuple[str, ...],
    place: Place,
) -> None:
    second = shard(tmp_path, random_tensors(seed))
    harm(second)
    error = refused(tmp_path, place)
    assert (type(error), error.reason) == (kind, reason)
    assert all(text in error.message for text in (second.name, *told))


def test_heads_that_do_not_divide(tmp_path: Path, seed: int) -> None:
    write(tmp_path, random_tensors(seed))
    error = refused(tmp_path, Place(0, 3))
    assert "tensor_parallel_size 3 does not divide" in error.message
    assert "pass one of 1, 2, 4" in error.message


def test_heads_of_a_whole_canvas_are_told_once() -> None:
    told = refused(Path("demo-canvas"), Place(0, 4)).message
    assert "4 does not divide LLaDAModelLM's 6 attention heads and 6 key-value heads; pass" in told


@pytest.mark.parametrize(
    ("device", "num_ranks", "told"),
    [
        ("auto", 4, "from cuda:0 on this machine has 2; pass at most 2, or --device cpu"),
        ("cuda:1", 2, "from cuda:1 on this machine has 1; pass at most 1, or --device cpu"),
    ],
)
def test_more_ranks_than_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, num_ranks: int, told: str
) -> None:
    """Before any rank is started."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    config = EngineConfig(model=str(tmp_path), device=device, tensor_parallel_size=num_ranks)

    def start() -> None:
        ways: dict[str, Any] = {"open_worker": open_worker, "module": "not.a.module"}
        open_group(config, num_ranks, lambda *_: None, hosts=ThisHost(config, num_ranks), **ways)

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(InvalidRequest) as caught:
        start()
    assert (
        f"{num_ranks} ranks (tensor_parallel_size x pipeline_parallel_size) need"
        in caught.value.message
    )
    assert told in caught.value.message
    assert caught.value.param == "tensor_parallel_size"
    sizes: dict[str, Any] = {"address": "a", "own_ranks": range(4), "local_size": 4}
    with pytest.raises(InvalidRequest, match=r"^8 ranks .*, 4 of them here, .* has [12];"):
        SeveralHosts(config, 8, **sizes, ends_silent_leader=True).check()


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        ({"tensor_parallel_size": 3, "nnodes": 3}, "tensor_parallel_size 3 does not divide"),
        ({"pipeline_parallel_size": 60, "nnodes": 2}, "pipeline_parallel_size 60 stages"),
    ],
)
def test_other_hosts_are_not_waited_for_to_refuse_a_size(
    tmp_path: Path, sizes: dict[str, int], told: str
) -> None:
    """They may have an image to fetch first, and half an hour for it."""
    token = tmp_path / "token"
    token.write_text("0123456789abcdef")
    config = EngineConfig(
        model="demo",
        device="cpu",
        leader_address=f"127.0.0.1:{free_port()}",
        group_token_file=str(token),
        **sizes,  # type: ignore[arg-type]
    )

    def report(stage: str, *_: int) -> None:
        assert not stage.startswith("waiting"), stage

    with pytest.raises(InvalidRequest, match=told):
        compose(config, report)

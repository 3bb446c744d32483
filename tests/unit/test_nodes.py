"""Which ranks a start runs, from flags and from what launchers set."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from engine_service.config import EngineConfig
from engine_service.nodes import node_of, read_token, serving_node
from engine_service.ranks.likeness import _OF_ONE_NODE, difference, likeness
from tidemill.commands import engine, serve
from tidemill.runtime.errors import FailedPrecondition, InvalidRequest

LWS = {"LWS_LEADER_ADDRESS": "group-0.tm", "LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1"}
TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}


def place(environ: dict[str, str] | None = None, **values: Any) -> tuple[Any, ...] | None:
    node = node_of(EngineConfig(**values), environ or {})
    if node is None:
        return None
    return (node.index, node.count, node.leader, [*node.ranks], node.local_rank, node.local_size)


def test_one_host_is_no_node_whatever_the_environment_says() -> None:
    assert place() is None
    assert place({**LWS, **TORCHRUN}, tensor_parallel_size=4) is None
    assert place({**LWS, "LWS_GROUP_SIZE": "1"}, executor="lws", tensor_parallel_size=8) is None
    assert place({**TORCHRUN, "WORLD_SIZE": "1"}, executor="torchrun") is None


def test_nodes_by_hand_have_equal_shares() -> None:
    values: dict[str, Any] = {"nnodes": 2, "tensor_parallel_size": 4}
    first = place(**values, leader_address="gpu-0")
    assert first == (0, 2, ("gpu-0", 50065), [0, 1], 0, 2)
    second = place(**values, node_rank=1, leader_address="gpu-0:600")
    assert second == (1, 2, ("gpu-0", 600), [2, 3], 0, 2)
    for text, address in {"[::1]:7": ("::1", 7), "fe80::2": ("fe80::2", 50065)}.items():
        found = place(**values, leader_address=text)
        assert found is not None
        assert found[2] == address


def test_only_the_first_node_serves() -> None:
    values: dict[str, Any] = {"nnodes": 2, "tensor_parallel_size": 2, "leader_address": "a"}
    assert serving_node(EngineConfig(**values), {}) is not None
    with pytest.raises(InvalidRequest, match=r"node 1 of 2 follows node 0 .* tidemill engine"):
        serving_node(EngineConfig(**values, node_rank=1), {})
    with pytest.raises(InvalidRequest, match="node 1 of 2 follows"):
        serve.run(["demo", "-tp=2", "--nnodes=2", "--node-rank=1", "--dist-init-addr=a"])


def test_several_engines_are_not_started_to_refuse_the_same_flag_each() -> None:
    with pytest.raises(InvalidRequest, match="node_rank 1 is not one of nnodes 1"):
        engine.run(["demo", "--data-parallel-size=2", "--node-rank=1", "--device=cpu"])


def test_torchrun_starts_a_process_for_every_rank() -> None:
    found = place(TORCHRUN, executor="torchrun", tensor_parallel_size=4)
    assert found == (3, 4, ("10.0.0.1", 50065), [3], 1, 2)


def test_a_pod_of_a_leader_worker_set_has_its_share() -> None:
    found = place(LWS, executor="lws", tensor_parallel_size=16)
    assert found == (1, 2, ("group-0.tm", 50065), [*range(8, 16)], 0, 8)
    found = place(LWS, executor="lws", tensor_parallel_size=2, leader_address="there:1")
    assert found == (1, 2, ("there", 1), [1], 0, 1)


@pytest.mark.parametrize(
    ("values", "environ", "told"),
    [
        ({"nnodes": 2, "leader_address": "a", "tensor_parallel_size": 3}, {}, "3 ranks .* 2 nodes"),
        ({"nnodes": 2, "tensor_parallel_size": 2}, {}, "needs --leader-address"),
        ({"nnodes": 2, "node_rank": 2, "leader_address": "a"}, {}, "pass 0 to 1"),
        ({"nnodes": 2, "leader_address": "a"}, {}, "2 nodes need 2 ranks .* is 1: pass a --tensor"),
        ({"node_rank": 1}, {}, "node_rank 1 is not one of nnodes 1: .* number of hosts with --nn"),
        ({"nnodes": 0}, {}, "nnodes is 0; pass 1 to 64"),
        ({"nnodes": -2, "node_rank": 0}, {}, "nnodes is -2"),
        ({"leader_address": "a"}, {}, "says nothing of one node"),
        ({"leader_address": "a:b", "nnodes": 2, "tensor_parallel_size": 2}, {}, "not HOST or HOST"),
        ({"leader_address": "a:70000", "nnodes": 2, "tensor_parallel_size": 2}, {}, "1 to 65535"),
        (
            {"group_token_file": "t"},
            {},
            "group_token_file 't' says nothing of one node; .* --nnodes",
        ),
        ({"executor": "ray", "group_token_file": "t"}, {}, "nothing of executor ray: leave it out"),
        ({"executor": "simulated", "group_token_file": "t"}, {}, "nothing of executor simulated"),
        ({"executor": "ray", "nnodes": 2}, {}, "pass one or the other"),
        ({"executor": "ray", "leader_address": "a"}, {}, "says nothing of executor ray"),
        ({"executor": "lws"}, {}, "LWS_LEADER_ADDRESS, LWS_GROUP_SIZE, LWS_WORKER_INDEX are not"),
        ({"executor": "lws", "node_rank": 1}, LWS, "node_rank say"),
        ({"executor": "lws", "tensor_parallel_size": 3}, LWS, "do not go evenly over 2 nodes"),
        ({"executor": "torchrun"}, {}, "RANK, WORLD_SIZE, .* start it by torchrun"),
        ({"executor": "torchrun"}, TORCHRUN, r"4 processes \(WORLD_SIZE\) and the engine has 1"),
        (
            {"executor": "torchrun", "pipeline_parallel_size": 2, "tensor_parallel_size": 4},
            TORCHRUN,
            "the engine has 8 ranks; pass --tensor-parallel-size 2, or",
        ),
        (
            {"executor": "torchrun", "pipeline_parallel_size": 3},
            TORCHRUN,
            "pass --tensor-parallel-size 4 --pipeline-parallel-size 1, or",
        ),
        ({"executor": "torchrun"}, {**TORCHRUN, "RANK": "x"}, "RANK is 'x', not a number"),
        ({"executor": "torchrun"}, {**TORCHRUN, "RANK": "4"}, "RANK is 4 and WORLD_SIZE 4"),
        ({"executor": "torchrun"}, {**TORCHRUN, "LOCAL_RANK": "2"}, "LOCAL_RANK is 2 and LOCAL_W"),
        ({"executor": "lws"}, {**LWS, "LWS_GROUP_SIZE": "0"}, "INDEX is 1 and LWS_GROUP_SIZE 0"),
        ({"executor": "lws"}, {**LWS, "LWS_WORKER_INDEX": "2"}, "INDEX is 2 and LWS_GROUP_SIZE 2"),
    ],
)
def test_what_contradicts_itself_is_refused(
    values: dict[str, Any], environ: dict[str, str], told: str
) -> None:
    with pytest.raises(InvalidRequest, match=told):
        node_of(EngineConfig(**values), environ)


def test_a_token_is_long_enough_and_kept_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "token"
    config = EngineConfig(group_token_file=str(path))
    with pytest.raises(FailedPrecondition, match="need --group-token-file FILE"):
        read_token(EngineConfig())
    with pytest.raises(FailedPrecondition, match="No such file"):
        read_token(config)
    path.write_text("short\n")
    with pytest.raises(FailedPrecondition, match="has 5 characters, 16 are the least"):
        read_token(config)
    path.write_bytes(bytes(4097))
    with pytest.raises(FailedPrecondition, match="has more than 4096 characters"):
        read_token(config)
    path.write_text("0123456789abcdef\n")
    assert read_token(config) == b"0123456789abcdef"


def test_hosts_are_compared_by_versions_and_by_what_ranks_read() -> None:
    own = likeness(EngineConfig(model="m", tensor_parallel_size=2, engine_port=1))
    alike = likeness(EngineConfig(model="m", tensor_parallel_size=2, node_rank=1, host="::"))
    assert difference(own, alike, "on rank 1") is None
    assert difference(own, likeness(None), "on rank 1") is None
    other = likeness(EngineConfig(model="n", tensor_parallel_size=2, page_size=8))
    assert difference(own, other, "on rank 1") == (
        "model is 'm' on rank 0 and 'n' on rank 1; page_size is None on rank 0 and 8 on rank 1: "
        "all hosts of a group need the same versions and flags"
    )
    for name in ("torch", "triton"):
        older = {**alike, "versions": {**alike["versions"], name: "2.1"}}
        told = difference(own, older, "on rank 1")
        assert told is not None
        assert f"{name} is {own['versions'][name]!r} on rank 0 and '2.1' on rank 1" in told


def test_how_kv_travels_is_for_who_serves_and_who_moves_it_for_all() -> None:
    flags: dict[str, Any] = {"kv_connector": "grpc", "kv_transfer_timeout_s": 5.0}
    flags |= {"kv_tls_ca": "ca.pem", "kv_tls_name": "prefill"}
    own, other = (likeness(EngineConfig(role="decode", **told)) for told in (flags, {}))
    assert difference(own, other, "on rank 1") is None
    told = difference(own, likeness(EngineConfig(role="prefill", **flags)), "on rank 1")
    assert told is not None
    assert told.startswith("role is 'decode' on rank 0 and 'prefill' on rank 1: ")


def test_what_one_node_has_for_itself_are_flags_that_there_are() -> None:
    assert {field.name for field in fields(EngineConfig)} >= _OF_ONE_NODE

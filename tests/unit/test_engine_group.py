"""In what the engines of one command differ: ports, addresses, GPUs, cores. Nothing is started."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

import pytest

from engine_service.config import EngineConfig
from frontend.config import FrontendConfig
from tests.waiting import free_port
from tidemill.commands import engine, serve
from tidemill.commands.engine_group import engines_of, placed, wishes_of, with_ports
from tidemill.commands.ports import settle
from tidemill.keywords import engine_config
from tidemill.runtime.errors import FailedPrecondition, InvalidRequest, Unsupported


def devices(count: int, gpus: int, **config: Any) -> list[str]:
    plans = placed(engines_of(EngineConfig(**config), count), lambda: gpus, {})
    return [plan.config.device for plan in plans]


def never() -> int:
    raise AssertionError("GPUs were counted")


def test_ports_count_up_and_free_ones_stay_free() -> None:
    config = EngineConfig(engine_port=7000, admin_port=7100, metrics_port=0)
    found = engines_of(config, 3)
    assert [one.engine_port for one in found] == [7000, 7001, 7002]
    assert [one.admin_port for one in found] == [7100, 7101, 7102]
    assert {one.metrics_port for one in found} == {0}
    assert {one.health_port for one in found} == {None}
    settled = with_ports(found, settle(wishes_of(found)))
    assert [one.engine_port for one in settled] == [7000, 7001, 7002]
    assert len({one.metrics_port for one in settled} - {0}) == 3
    assert {one.health_port for one in settled} == {None}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("tcp://*:5557", "tcp://*:5558"),
        ("tcp://router.example:5557", "tcp://router.example:5558"),
        ("tcp://[::1]:5557", "tcp://[::1]:5558"),
        ("inproc://kv", "inproc://kv_dp1"),
        ("ipc:///tmp/kv", "ipc:///tmp/kv_dp1"),
    ],
)
def test_addresses_of_kv_events_count_up_as_vllm_counts(first: str, second: str) -> None:
    found = engines_of(EngineConfig(kv_events_zmq=first), 2)
    assert [one.kv_events_zmq for one in found] == [first, second]


@pytest.mark.parametrize(
    ("config", "count", "words"),
    [
        ({}, 0, "data_parallel_size is 0"),
        ({"kv_events_zmq": "tcp://*:*"}, 2, "ends in no port"),
        ({"kv_events_zmq": "tcp://*:65535"}, 2, "kv_events_zmq counts .* from 65535, and engine 1"),
        ({"admin_port": 65534}, 3, "engine 2 .* would get 65536: the last port is 65535; begin"),
        (
            {"kv_events_zmq": "tcp://*:5557", "kv_events_replay": "tcp://*:5558"},
            2,
            "tcp://.:5558 would be .* leave 2 or more",
        ),
    ],
)
def test_what_cannot_be_counted_is_refused(config: Any, count: int, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        engines_of(EngineConfig(**config), count)
    engines_of(EngineConfig(**config), 1)


@pytest.mark.parametrize(
    ("count", "gpus", "config", "wanted"),
    [
        (2, 8, {}, ["cuda:0", "cuda:1"]),
        (2, 4, {"tensor_parallel_size": 2}, ["cuda:0", "cuda:2"]),
        (2, 8, {"device": "cuda:4", "tensor_parallel_size": 2}, ["cuda:4", "cuda:6"]),
        (3, 0, {}, ["cpu"] * 3),
        (1, 0, {"device": "cuda"}, ["cuda"]),
    ],
)
def test_every_engine_has_the_next_gpus(
    count: int, gpus: int, config: dict[str, Any], wanted: list[str]
) -> None:
    assert devices(count, gpus, **config) == wanted


@pytest.mark.parametrize(
    ("count", "gpus", "config", "words"),
    [
        (3, 2, {}, "needs 3 GPUs; there are 2: pass --data-parallel-size 2, or --device cpu"),
        (
            3,
            5,
            {"tensor_parallel_size": 2},
            "needs 6 GPUs; there are 5: pass .*, or pass .* 5",
        ),
        (2, 4, {"device": "cuda:3"}, "there are 1 from cuda:3 on: pass --data-parallel-size 1"),
        (2, 0, {"device": "cuda"}, "there are 0: no engine fits, or --device cpu"),
        (
            2,
            1,
            {"tensor_parallel_size": 2},
            "there are 1: pass --data-parallel-size, --tensor-parallel-size and",
        ),
    ],
)
def test_more_gpus_than_there_are_are_refused(
    count: int, gpus: int, config: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidRequest, match=words) as refused:
        devices(count, gpus, **config)
    assert refused.value.param == "data_parallel_size"
    devices(count, count * config.get("tensor_parallel_size", 1) + 3, **config)


@pytest.mark.parametrize("config", [{"device": "cpu"}, {"executor": "simulated"}])
def test_nobody_counts_gpus_that_are_not_wanted(config: dict[str, Any]) -> None:
    placed(engines_of(EngineConfig(**config), 2), never, {})
    placed([EngineConfig()], never, {})
    with pytest.raises(AssertionError, match="were counted"):
        placed(engines_of(EngineConfig(), 2), never, {})


@pytest.mark.parametrize(("ranks", "share"), [(1, 4), (2, 2), (8, 1)])
def test_engines_share_the_cores(monkeypatch: pytest.MonkeyPatch, ranks: int, share: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    engines = engines_of(EngineConfig(device="cpu", tensor_parallel_size=ranks), 2)
    threads = [plan.environ.get("OMP_NUM_THREADS") for plan in placed(engines, never, {})]
    assert threads == [str(share)] * 2
    for plan in placed(engines, never, {"OMP_NUM_THREADS": "3"}) + placed(engines[:1], never, {}):
        assert "OMP_NUM_THREADS" not in plan.environ


def of_serve(config: EngineConfig, count: int) -> Any:
    return serve.settled(config, FrontendConfig(http_port=0, grpc_port=0), count)


@pytest.mark.parametrize("settled", [of_serve, engine.settled])
def test_a_taken_port_names_the_engine_and_the_flag(settled: Callable[..., Any]) -> None:
    first = free_port(neighbours=2)
    port = first + 1
    config = EngineConfig(device="cpu", engine_port=first)
    with socket.create_server(("127.0.0.1", port)):
        words = f"{port} for engine 1 of 2: the port is in use; stop .* with --engine-port"
        with pytest.raises(FailedPrecondition, match=words):
            settled(config, 2)
    settled(config, 2)


def test_ports_of_two_flags_that_meet_are_named() -> None:
    free = free_port(neighbours=3)
    config = EngineConfig(device="cpu", engine_port=free, admin_port=free + 1)
    words = "it is --admin-port of engine 0 of 2's or choose another with --engine-port"
    with pytest.raises(FailedPrecondition, match=words):
        engine.settled(config, 2)


def test_a_frontend_gets_all_addresses() -> None:
    plans, frontend = of_serve(EngineConfig(device="cpu", engine_port=0), 3)
    assert frontend.engine == ",".join(plan.address for plan in plans)
    assert len(set(frontend.engine.split(","))) == 3


def test_engines_with_tls_are_asked_on_a_port_of_their_own() -> None:
    plans = engine.settled(EngineConfig(device="cpu", engine_port=0, tls_cert="a"), 2)
    assert len({plan.config.health_port for plan in plans} - {0, None}) == 2


def test_an_llm_is_one_engine_and_says_what_to_do() -> None:
    with pytest.raises(Unsupported, match="tidemill serve demo --data-parallel-size 2") as refused:
        engine_config("demo", {"data_parallel_size": 2})
    assert refused.value.param == "data_parallel_size"
    assert engine_config("demo", {"data_parallel_size": 1}) == engine_config("demo", {})

"""Values that no service takes: refused before anything starts, and in the same words where a
config is only to be shown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import get_args

import pytest

from engine_service import nodes
from engine_service.config import EngineConfig
from engine_service.limits import _RANGES, check
from frontend import limits as frontend_limits
from frontend.config import FrontendConfig
from frontend.gate import _RATE_FLAGS
from tidemill.cli import main
from tidemill.ranges import Range
from tidemill.runtime.errors import InvalidRequest, Unsupported
from tidemill.runtime.options import settings_of

ENGINE = (
    (["--max-rows=0"], "max_rows 0 is less than 1 (one request); pass 1 or more"),
    (["--max-model-len=1"], "max_model_len 1 is less than 2 (one prompt token and one output"),
    (["--engine-port=99999"], "engine_port 99999 is more than 65535 (the last port); pass 65535"),
    (["--trace-level=9"], "trace_level 9 is more than 3 (all spans); pass 3 or less"),
    (["--memory-fraction=nan"], "memory_fraction nan is less than 0"),
    (["--max-logprobs=-1"], "max_logprobs -1 is less than 0 (a count); pass 0 or more"),
    (["--kv-connector=shm"], "kv_connector is 'shm', which only engines that move KV read"),
    (["--role=prefill", "--no-prefix-caching"], "prefix_caching is off; pass --role both"),
    (["--data-parallel-size=0"], "data_parallel_size is 0; at least 1 engine works"),
    (["--data-parallel-size=2", "--kv-events-zmq=tcp://*"], "kv_events_zmq is 'tcp://*', which"),
    (["--nnodes=2"], "nnodes 2 needs --leader-address"),
    (["--executor=lws", "--nnodes=2"], "executor lws knows that itself: pass one or the other"),
    (["--executor=torchrun", "--leader-address=a:b"], "leader_address 'a:b' is not HOST or"),
    (["--engine-port=65535", "--data-parallel-size=2"], "engine_port counts up per engine from 65"),
    (["-tp=9", "--pp=8"], "is 9, 72 in all; a group has 1 to 64 ranks: pass --pipeline-parallel-"),
    (["--pp=99"], "is 1, 99 in all; a group has 1 to 64 ranks: pass --pipeline-parallel-size 64"),
    (["--expert-parallel"], "and tensor_parallel_size is 1: leave it out"),
    (["--executor=simulated", "-tp=2"], "the simulated executor is one rank; tensor_parallel_size"),
    (["--executor=simulated", "--expert-parallel"], "the simulated executor has no experts"),
    (["--tls-key=key.pem"], "TLS needs both --tls-cert and --tls-key"),
    (["--role=decode", "--kv-tls-name=a"], "--kv-tls-name a is the name in prefill engines'"),
    (["--age-bound-s=inf"], "age_bound_s inf is more than 1000000000 (thirty years); pass"),
    (["--heartbeat-timeout-s=0"], "heartbeat_timeout_s 0.0 is not more than 0 (no time); pass"),
    (["--max-message-bytes=2147483648"], "more than 2147483647 (what gRPC can count); pass"),
)
FRONTEND = (
    (["--engine-silence-s=0"], "engine_silence_s is 0; it must be at least 1"),
    (["--tool-call-parser=nobodys"], "--tool-call-parser is 'nobodys'; it must be auto, none or"),
    (["--served-model-name=,"], "served_model_name"),
    (["--ip-requests-per-minute=-1"], "ip_requests_per_minute is -1; it must be at least 1"),
    (["--trace-sample-ratio=7"], "the share of traced requests is 7"),
    (["--tls-client-ca=ca.pem"], "TLS needs both --tls-cert and --tls-key"),
    (["--http-port=99999"], "http_port 99999 is more than 65535 (the last port); pass 65535 or"),
    (["--grpc-port=-1"], "grpc_port -1 is less than 0 (a free port); pass 0 or more"),
    (["--health-port=99999"], "health_port 99999 is more than 65535"),
    (["--request-timeout-s=0"], "request_timeout_s 0.0 is not more than 0 (no time); pass more"),
    (["--trusted-proxies=10.0.0.0/99"], "--trusted-proxies: '10.0.0.0/99' does not appear to be"),
    (["--key-tokens-per-minute=5"], "key_tokens_per_minute need keys: --api-keys-file or"),
)
STARTS = [
    *((verb, *one) for verb in ("engine", "serve") for one in ENGINE),
    *((verb, *one) for verb in ("frontend", "serve") for one in FRONTEND),
    ("generate", ["--prompt=x", *ENGINE[0][0]], ENGINE[0][1]),
    ("frontend", ["--engine-tls-name=a"], "--engine-tls-name need --engine-tls-ca"),
]


@pytest.mark.parametrize(("verb", "argv", "words"), STARTS)
def test_shown_or_started_a_config_is_refused_in_the_same_words(
    capsys: pytest.CaptureFixture[str], verb: str, argv: list[str], words: str
) -> None:
    said = []
    for more in (["--print-config"], []):
        assert main([verb, *argv, *more]) == 1
        out, err = capsys.readouterr()
        assert out == ""
        said.append(err)
    assert said[0].startswith(f"tidemill {verb}: ")
    assert words in said[0]
    assert said[0] == said[1]


@pytest.mark.parametrize("verb", ["engine", "serve"])
@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--executor=lws"], "LWS_LEADER_ADDRESS, LWS_GROUP_SIZE, LWS_WORKER_INDEX are not set"),
        (["--executor=torchrun"], "are not set: start it by torchrun"),
        (["-tp=2", "--nnodes=2", "--node-rank=1", "--leader-address=a"], "node 1 of 2 follows"),
    ],
)
def test_a_config_is_shown_wherever_it_would_not_start(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    verb: str,
    argv: list[str],
    words: str,
) -> None:
    """What only the environment, or the place in a group, forbids."""
    for name in (*nodes._LWS, *nodes._TORCHRUN):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit) as leaving:
        main([verb, *argv, "--print-config"])
    assert (leaving.value.code, capsys.readouterr().err) == (0, "")
    if (verb, words) != ("engine", "node 1 of 2 follows"):  # there it would start, and wait
        assert main([verb, *argv]) == 1
        assert words in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["engine", "serve", "frontend", "generate"])
def test_other_configs_are_shown(capsys: pytest.CaptureFixture[str], verb: str) -> None:
    with pytest.raises(SystemExit) as leaving:
        main([verb, "--print-config", *(["--prompt=x"] if verb == "generate" else [])])
    assert (leaving.value.code, capsys.readouterr().err) == (0, "")


def test_a_config_without_anything_chosen_is_taken() -> None:
    """None where that is a default: it is chosen later."""
    check(EngineConfig())
    check(EngineConfig(role="decode"))
    frontend_limits.check(FrontendConfig())


@pytest.mark.parametrize("name", _RANGES)
def test_the_ends_of_every_range_are_taken(name: str) -> None:
    config = EngineConfig(role="decode" if name.startswith("kv_") else "both")
    check_ends(name, _RANGES[name], lambda value: check(replace(config, **{name: value})))


@pytest.mark.parametrize("name", frontend_limits._RANGES)
def test_the_ends_of_every_range_of_a_frontend_are_taken(name: str) -> None:
    def given(value: float) -> None:
        frontend_limits.check(replace(FrontendConfig(), **{name: value}))

    check_ends(name, frontend_limits._RANGES[name], given)


def check_ends(name: str, allowed: Range, given: Callable[[float], None]) -> None:
    above, more = (1e-9, "more than {:g}") if allowed.is_open else (0, "{:g} or more")
    given(allowed.least + above)
    for low in {allowed.least - 1, allowed.least + above - 1e-9, float("nan")}:
        told = rf"{name} .* pass {more.format(allowed.least)}"
        with pytest.raises(InvalidRequest, match=told) as refused:
            given(low)
        assert refused.value.param == name
    if allowed.most < float("inf"):
        given(allowed.most)
        with pytest.raises(InvalidRequest, match=rf"{name} .* pass {allowed.most:.10g} or less"):
            given(allowed.most + 1)


def test_every_number_of_a_frontend_has_its_limits() -> None:
    """A number that is added to the config must be listed, or be checked elsewhere."""
    elsewhere = {"engine_silence_s", "trace_sample_ratio", *_RATE_FLAGS}
    numbers = {
        name
        for name, setting in settings_of(FrontendConfig).items()
        if {int, float} & {setting.hint, *get_args(setting.hint)}
    }
    assert numbers == set(frontend_limits._RANGES) | elsewhere


def test_a_role_that_the_config_rules_out() -> None:
    for flags in ({"prefix_caching": False}, {"executor": "simulated"}):
        with pytest.raises(Unsupported, match="pass --role both"):
            check(EngineConfig(role="decode", **flags))
        check(EngineConfig(**flags))

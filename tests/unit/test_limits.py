"""Values that no service takes: refused before anything starts, and in the same words where a
config is only to be shown."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine_service.config import EngineConfig
from engine_service.limits import _RANGES, check
from tidemill.cli import main
from tidemill.runtime.errors import InvalidRequest, Unsupported

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
)
FRONTEND = (
    (["--engine-silence-s=0"], "engine_silence_s is 0; it must be at least 1"),
    (["--tool-call-parser=nobodys"], "--tool-call-parser is 'nobodys'; it must be auto, none or"),
    (["--served-model-name=,"], "served_model_name"),
    (["--ip-requests-per-minute=-1"], "ip_requests_per_minute is -1; it must be at least 1"),
    (["--trace-sample-ratio=7"], "the share of traced requests is 7"),
)
STARTS = [
    *((verb, *one) for verb in ("engine", "serve") for one in ENGINE),
    *((verb, *one) for verb in ("frontend", "serve") for one in FRONTEND),
    ("generate", ["--prompt=x", *ENGINE[0][0]], ENGINE[0][1]),
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


@pytest.mark.parametrize("verb", ["engine", "serve", "frontend", "generate"])
def test_other_configs_are_shown(capsys: pytest.CaptureFixture[str], verb: str) -> None:
    with pytest.raises(SystemExit) as leaving:
        main([verb, "--print-config", *(["--prompt=x"] if verb == "generate" else [])])
    assert (leaving.value.code, capsys.readouterr().err) == (0, "")


@pytest.mark.parametrize("name", _RANGES)
def test_the_ends_of_every_range_are_taken(name: str) -> None:
    """None where that is a default: it is chosen later."""
    allowed = _RANGES[name]
    given = {"role": "decode"} if name.startswith("kv_") else {}
    config = EngineConfig(**given)
    check(config)
    check(replace(config, **{name: allowed.least}))
    with pytest.raises(InvalidRequest, match=rf"{name} .* pass {allowed.least:g} or more") as low:
        check(replace(config, **{name: allowed.least - 1}))
    assert low.value.param == name
    if allowed.most < float("inf"):
        check(replace(config, **{name: allowed.most}))
        with pytest.raises(InvalidRequest, match=rf"{name} .* pass {allowed.most:g} or less"):
            check(replace(config, **{name: allowed.most + 1}))


def test_a_role_that_the_config_rules_out() -> None:
    for flags in ({"prefix_caching": False}, {"executor": "simulated"}):
        with pytest.raises(Unsupported, match="pass --role both"):
            check(EngineConfig(role="decode", **flags))
        check(EngineConfig(**flags))

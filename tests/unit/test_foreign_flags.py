"""Flags of vLLM and SGLang: either taken, or refused with what to do instead."""

import json
import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from engine_service.config import EngineConfig
from frontend.config import FrontendConfig
from tidemill import cli
from tidemill.bench.traffic.options import ServeOptions
from tidemill.commands.bench import BENCHMARKS, Report
from tidemill.commands.foreign_flags import ADVICE, BENCH_ADVICE
from tidemill.commands.launcher_config import LauncherConfig
from tidemill.commands.spellings import SPELLINGS
from tidemill.runtime.options import flag_of, settings_of

OURS = {
    flag_of(name)
    for kind in (EngineConfig, FrontendConfig, LauncherConfig)
    for name in settings_of(kind)
}
NAMED = re.compile(r"--[a-z0-9-]+[a-z]")


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--quantization", "awq"], "--quantization: Tidemill serves no quantized weights"),
        (["--quantization=awq"], "--quantization=awq: Tidemill serves no quantized weights"),
        (["--tp", "2", "--enable-lora"], "--enable-lora: Tidemill serves no LoRA adapters"),
        (["-q", "fp8"], "-q: Tidemill serves no quantized weights"),
        (["--page-sise", "16"], "--page-sise; did you mean --page-size"),
        (["--nothing-of-the-kind"], "unknown argument --nothing-of-the-kind\n"),
    ],
)
@pytest.mark.parametrize("verb", [["serve"], ["engine"], ["bench", "latency"]], ids=" ".join)
def test_an_unknown_flag_says_what_to_do(
    capsys: pytest.CaptureFixture[str], verb: list[str], argv: list[str], told: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([*verb, *argv])
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


def test_so_does_a_key_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "flags.yaml"
    file.write_text("swap-space: 4\n")
    with pytest.raises(SystemExit):
        cli.main(["serve", f"--config={file}"])
    assert "swap_space: Tidemill moves neither weights nor KV" in capsys.readouterr().err


def shown(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    with pytest.raises(SystemExit) as ended:
        cli.main(["serve", *argv, "--print-config"])
    assert ended.value.code == 0, capsys.readouterr().err
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_spellings_of_other_servers(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["demo", "--block-size", "32", "-tp=2", "--no-enable-prefix-caching", "--port=0"]
    found = shown(capsys, *words, "--served-model-name=--port=1")
    assert (found["model"], found["page_size"], found["tensor_parallel_size"]) == ("demo", 32, 2)
    assert (found["prefix_caching"], found["http_port"]) == (False, 0)
    assert found["served_model_name"] == "--port=1", "a value is no flag"


@pytest.mark.parametrize("written", [str, lambda text: text.replace("-", "_")])
def test_a_file_for_another_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], written: Callable[[str], str]
) -> None:
    """As vLLM's users have them, with dashes or without."""
    flags = {
        "model": "demo",
        "max-model-len": 512,
        "tensor-parallel-size": 2,
        "gpu-memory-utilization": 0.5,
        "max-num-seqs": 3,
        "no-enable-prefix-caching": True,
        "disable-cuda-graph": False,
        "served-model-name": ["a", "b"],
        "port": 8001,
    }
    file = tmp_path / "flags.yaml"
    file.write_text(json.dumps({written(key): value for key, value in flags.items()}))
    found = shown(capsys, f"--config={file}")
    assert (found["model"], found["max_model_len"]) == ("demo", 512)
    assert found["tensor_parallel_size"] == 2
    assert (found["memory_fraction"], found["max_rows"], found["http_port"]) == (0.5, 3, 8001)
    assert (found["prefix_caching"], found["enforce_eager"]) == (False, False)
    assert found["served_model_name"] == "a,b"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("max-num-seqs: 3\nmax_rows: 4\n", "max-num-seqs and max_rows are the same"),
        ("disable-radix-cache: perhaps\n", "disable-radix-cache is 'perhaps'; it is true or false"),
        ("enforce-eager: 'no'\n", "enforce-eager is 'no'; it is true or false"),
        ("api-key: [k1, k2]\n", "api-key is a list and takes one value; write api-key: SECRET"),
        ("max-num-seqs: [3]\n", "max-num-seqs is a list and takes one value; write max-num-seqs"),
        ("cors-origins: []\n", "cors-origins must be a list of one text or more, or be left out"),
        ("cors-origins: [[a]]\n", "cors-origins must be a list of one text or more"),
        ("max-num-sequs: [3]\n", "key in {file}: max_num_sequs"),
        ("max-num-sequs: 3\n", "key in {file}: max_num_sequs"),
    ],
)
def test_keys_that_do_not_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, told: str
) -> None:
    file = tmp_path / "flags.yaml"
    file.write_text(text)
    with pytest.raises(SystemExit) as ended:
        cli.main(["serve", f"--config={file}"])
    assert ended.value.code == 2
    assert told.format(file=file) in capsys.readouterr().err


def test_advice_names_flags_that_there_are_for_those_that_there_are_not() -> None:
    assert not OURS & ADVICE.keys(), "taken, so it never comes to advice"
    assert not SPELLINGS.keys() & ADVICE.keys()
    for text in ADVICE.values():
        assert set(NAMED.findall(text)) <= OURS, text
    for flag, ours in SPELLINGS.items():
        assert ours.replace("--no-", "--") in OURS, flag


def test_advice_of_benchmarks_names_flags_of_benchmarks() -> None:
    modules = {name: import_module(f"tidemill.bench.{name}") for name in BENCHMARKS}
    kinds = [getattr(modules[name], one.options) for name, one in BENCHMARKS.items()]
    measured = {flag_of(name) for kind in (*kinds, Report) for name in settings_of(kind)}
    own = BENCH_ADVICE.keys() - ADVICE.keys()
    assert "--request-rate" in own
    assert not own & (OURS | measured)
    for flag in own:
        assert set(NAMED.findall(BENCH_ADVICE[flag])) <= measured, flag


def test_every_flag_with_commas_may_be_a_list_in_a_file() -> None:
    for kind in (EngineConfig, FrontendConfig, LauncherConfig, ServeOptions):
        settings = settings_of(kind)
        told = {name for name, setting in settings.items() if "commas" in setting.doc}
        assert told == {name for name, setting in settings.items() if setting.is_listed}

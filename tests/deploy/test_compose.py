"""The compose files: valid, closed, and every flag, file, port and name in them is real."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.deploy import flags

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
SCHEMA = json.loads((ROOT / "tests" / "fixtures" / "compose" / "compose-spec.json").read_text())
OURS = ("engine", "frontend")


def load(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DOCKER / name).read_text())
    return found


def merged(base: Any, over: Any) -> Any:
    """As `-f base -f over` does with the mappings that we use."""
    if isinstance(base, dict) and isinstance(over, dict):
        return base | {key: merged(base.get(key), value) for key, value in over.items()}
    return over


STACKS = {
    "cpu": load("compose.yaml"),
    "gpu": merged(load("compose.yaml"), load("compose.gpu.yaml")),
}
every_stack = pytest.mark.parametrize("stack", STACKS.values(), ids=STACKS)


@every_stack
def test_valid(stack: dict[str, Any]) -> None:
    jsonschema.Draft202012Validator(SCHEMA).validate(stack)


def test_a_misspelt_field_is_seen() -> None:
    broken = merged(STACKS["cpu"], {"services": {"engine": {"enviroment": {}}}})
    with pytest.raises(jsonschema.ValidationError, match="enviroment"):
        jsonschema.Draft202012Validator(SCHEMA).validate(broken)


def environment(stack: dict[str, Any], service: str) -> dict[str, str]:
    """The variables of a service, with the defaults of those of the shell."""
    given = stack["services"][service]["environment"]
    return {key: re.sub(r"\$\{\w+:-(.*?)\}", r"\1", value) for key, value in given.items()}


@every_stack
def test_flags_exist_and_ports_fit(stack: dict[str, Any]) -> None:
    engine = flags.read("engine", [], environment(stack, "engine"))
    frontend = flags.read("frontend", [], environment(stack, "frontend"))
    assert frontend.engine == f"dns:///engine:{engine.engine_port}"
    ports = {int(words.rpartition(":")[2]) for words in stack["services"]["frontend"]["ports"]}
    assert ports == {frontend.http_port, frontend.grpc_port}
    (job, *_) = load("prometheus.yaml")["scrape_configs"]
    assert job["static_configs"][0]["targets"] == [f"engine:{engine.metrics_port}"]
    for config in (engine, frontend):
        assert config.otlp_endpoint == "http://otel-collector:4317"
    for name, config in (("engine", engine), ("frontend", frontend)):
        seconds = float(stack["services"][name]["stop_grace_period"].removesuffix("s"))
        assert seconds > config.drain_pause_s + config.drain_timeout_s


def test_an_unknown_variable_is_seen() -> None:
    with pytest.raises(AssertionError, match="TIDEMILL_MODLE"):
        flags.read("engine", [], {"TIDEMILL_MODLE": "demo"})


@every_stack
def test_closed(stack: dict[str, Any]) -> None:
    for name, service in stack["services"].items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"]
        assert "no-new-privileges:true" in service["security_opt"]
        assert re.fullmatch(r"[\w./-]+:v?\d[\w.-]*", service["image"]), service["image"]
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:"), f"{name}: {port} is open to the network"


@every_stack
@pytest.mark.parametrize("name", OURS)
def test_what_is_written_has_a_place(stack: dict[str, Any], name: str) -> None:
    service = stack["services"][name]
    volumes = [volume.split(":")[1] for volume in service.get("volumes", [])]
    assert flags.unwritable(name, [*service["tmpfs"], *volumes]) == []
    assert flags.unwritable(name, volumes) != []


@every_stack
def test_files_and_names_exist(stack: dict[str, Any]) -> None:
    for name, service in stack["services"].items():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            if source.startswith("."):
                assert (DOCKER / source).exists(), f"{name}: {source}"
            else:
                assert source in stack["volumes"]
        assert set(service.get("depends_on", [])) <= stack["services"].keys()
    for name in OURS:
        build = stack["services"][name]["build"]
        assert (DOCKER / build["context"] / build["dockerfile"]).exists()
        text = (ROOT / build["dockerfile"]).read_text()
        for argument, value in build.get("args", {}).items():
            assert f"ARG {argument}" in text
            assert argument != "LOCK" or (ROOT / value).exists()
    hosts = set(stack["services"])
    for file in ("otel-collector.yaml", "prometheus.yaml", "grafana/datasources.yaml"):
        named = set(re.findall(r"(?:^|[\s/])([a-z][a-z-]*):\d+", (DOCKER / file).read_text()))
        assert named <= hosts, f"{file}: {named - hosts}"


def test_collector_pipelines_use_what_is_there() -> None:
    config = load("otel-collector.yaml")
    for pipeline in config["service"]["pipelines"].values():
        for kind, names in pipeline.items():
            assert set(names) == config[kind].keys(), kind


def test_prometheus_reads_its_file(tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("no promtool: apt-get install prometheus")
    text = (DOCKER / "prometheus.yaml").read_text()
    text = text.replace("/etc/prometheus/tidemill", str(ROOT / "monitoring" / "prometheus"))
    for name, given, status in (("good", text, 0), ("bad", text + "scrape_cfg: []\n", 1)):
        file = tmp_path / f"{name}.yaml"
        file.write_text(given)
        done = subprocess.run([promtool, "check", "config", file], capture_output=True, text=True)
        assert done.returncode == status, done.stdout + done.stderr
    assert yaml.safe_load(text)["rule_files"]
    for pattern in yaml.safe_load(text)["rule_files"]:
        folder, _, name = pattern.rpartition("/")
        assert list(Path(folder).glob(name)), f"no rules at {pattern}"

"""The runbook names commands, flags, RPCs, metrics and files that exist."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml
from google.protobuf import descriptor_pool, json_format, message_factory

from tests.deploy import flags
from tidemill.bench.traffic.options import ServeOptions
from tidemill.commands.key import KeyOptions
from tidemill.commands.launcher_config import LauncherConfig
from tidemill.runtime import options
from tidemill.v1 import engine_pb2, text_pb2

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "docs" / "operations.md",
    ROOT / "docker" / "README.md",
    ROOT / "k8s" / "README.md",
]
TEXT = PAGES[0].read_text()
BLOCKS = re.findall(r"^```\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
COMMANDS = [
    shlex.split(line, comments=True)
    for block in BLOCKS
    for line in block.replace("\\\n", " ").splitlines()
    if line
]
RPCS = [words for words in COMMANDS if words[0] == ".venv/bin/buf"]
VERBS = [words[1:] for words in COMMANDS if words[0] == ".venv/bin/tidemill"]
OWN = {
    *("--api", "--arrival-cv", "--rate", "--trace-file"),  # tidemill bench serve
    *("--cacert", "--cert", "--key", "--http2-prior-knowledge"),  # buf curl
    *("--build-arg", "--read-only", "--secret"),  # docker
}
"""Flags of other commands, beside the two services'."""


def test_the_commands_are_found() -> None:
    assert {words[0] for words in COMMANDS} == {
        ".venv/bin/buf",
        ".venv/bin/tidemill",
        "curl",
        "kubectl",
        "openssl",
    }
    assert len(RPCS) >= 7
    assert len(VERBS) >= 5


@pytest.mark.parametrize("words", RPCS, ids=lambda words: words[-1].rpartition("/")[2])
def test_calls_are_of_the_contract(words: list[str]) -> None:
    service, method = words[-1].split("/")[-2:]
    assert engine_pb2.DESCRIPTOR.package == text_pb2.DESCRIPTOR.package == "tidemill.v1"
    found = descriptor_pool.Default().FindServiceByName(service).methods_by_name[method]
    body = json.loads(words[words.index("-d") + 1]) if "-d" in words else {}
    json_format.ParseDict(body, message_factory.GetMessageClass(found.input_type)())


@pytest.mark.parametrize("words", VERBS, ids=" ".join)
def test_verbs_take_their_flags(words: list[str]) -> None:
    verb, rest = words[0], words[1:]
    if verb == "engine":
        rest = [word for word in rest if word not in ("demo", "--print-config")]
        flags.read("engine", rest, {})
    elif verb == "frontend":
        flags.read("frontend", rest, {})
    elif verb == "key":
        assert rest[0] == "new"
        options.parse([KeyOptions], rest[1:], prog="key", positional="name", environ={})
    elif verb == "bench":
        assert rest[0] == "serve"
        kept = rest[1 : rest.index("--json")] + rest[rest.index("--json") + 2 :]
        options.parse([ServeOptions], kept, prog="bench", environ={})
    else:
        assert words == ["collect-env"]


def test_flags_exist() -> None:
    known = {
        options.flag_of(name)
        for kind in (*flags.KINDS.values(), LauncherConfig)
        for name in options.settings_of(kind)
    }
    pages = "".join(page.read_text() for page in PAGES)
    prose = re.sub(r"^```\n.*?^```", "", pages, flags=re.MULTILINE | re.DOTALL)
    named = set(re.findall(r"`(--[a-z][a-z0-9-]+)", prose))
    assert len(named) > 20
    assert named - OWN <= known, named - OWN - known
    variables = set(re.findall(r"TIDEMILL_([A-Z][A-Z_]+[A-Z])", prose)) - {"MODEL"}
    assert {options.flag_of(name.lower()) for name in variables} - {"--engine-port"} <= known


def test_every_alert_is_explained() -> None:
    rules = yaml.safe_load((ROOT / "monitoring" / "prometheus" / "alerts.yml").read_text())
    alerts = {rule["alert"] for group in rules["groups"] for rule in group["rules"]}
    assert set(re.findall(r"^\| (Tidemill\w+) \|", TEXT, re.MULTILINE)) == alerts


def test_the_printed_pipe_makes_a_rule_of_the_alerts() -> None:
    pipe = re.search(r"^(\{ printf 'apiVersion.*?\}) \|", PAGES[2].read_text(), re.DOTALL | re.M)
    assert pipe is not None
    out = subprocess.run(["bash", "-c", pipe[1]], cwd=ROOT, capture_output=True, check=True).stdout
    rule = yaml.safe_load(out)
    assert (rule["kind"], rule["metadata"]) == ("PrometheusRule", {"name": "tidemill"})
    assert len(rule["spec"]["groups"][0]["rules"]) > 5


def test_metrics_exist() -> None:
    code = "".join(
        path.read_text()
        for room in ("frontend", "engine_service", "tidemill")
        for path in (ROOT / room).rglob("*.py")
    )
    for name in set(re.findall(r"tidemill_([a-z_]+[a-z])", TEXT)):
        assert f'"{name.removesuffix("_total")}"' in code or f"tidemill_{name}" in code, name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", page.read_text())
    assert links
    assert [link for link in links if not (page.parent / link).exists()] == []

"""Dashboard and alert rules against live scrapes of both services, with promtool."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_open
from prometheus_client.parser import text_string_to_metric_families as read_plain

from tests.otlp import collecting
from tests.service.engine_fixtures import engine
from tests.service.frontends import frontend_for, write_tokenizer
from tests.waiting import http_client, until

FOLDER = Path(__file__).parents[2] / "monitoring"
OPEN = {"accept": "application/openmetrics-text; version=1.0.0"}
_WORD = re.compile(r"\b(?:tidemill|gen_ai|rpc|process|http|python|vllm)_\w+\b")
promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")


class Scrapes(NamedTuple):
    """What both services said, plainly and as OpenMetrics."""

    plain: dict[str, str]
    open: dict[str, str]

    @property
    def labels(self) -> dict[str, set[str]]:
        """Of every sample, by its name."""
        found: dict[str, set[str]] = {}
        for text in self.plain.values():
            for family in read_plain(text):
                for sample in family.samples:
                    found.setdefault(sample.name, set()).update(sample.labels)
        return found


async def scrape(folder: Path, alias: str) -> Scrapes:
    """After a request that ended well, one that was refused, and one whose trace was kept."""
    write_tokenizer(folder)
    with collecting() as (_, endpoint):
        flags = {"otlp_endpoint": endpoint, "metrics_alias": alias}
        async with (
            engine(metrics_port=0, **flags) as server,
            frontend_for(server.port, tokenizer=str(folder), **flags) as frontend,
            http_client(f"http://127.0.0.1:{frontend.http_port}") as http,
        ):
            await until(lambda: frontend.desk.fleet.state == "ready")
            core = server.desk.core
            body = {"prompt": "ab", "max_tokens": 3}
            assert (await http.post("/v1/completions", json=body)).status_code == 200
            refused = {"prompt": "ab", "max_tokens": 400, "n": 16}
            assert (await http.post("/v1/completions", json=refused)).status_code == 429
            await until(lambda: core.num_live == 0)
            urls = {
                "frontend": f"http://127.0.0.1:{frontend.http_port}/metrics",
                "engine": f"http://127.0.0.1:{server.metrics_port}/metrics",
            }
            plain = {name: (await http.get(url)).text for name, url in urls.items()}
            opened = {name: (await http.get(url, headers=OPEN)).text for name, url in urls.items()}
    return Scrapes(plain, opened)


def expressions() -> dict[str, str]:
    """Every query of the dashboard and of the rules, by where it stands."""
    board = json.loads((FOLDER / "grafana" / "tidemill.json").read_text())
    found = {
        f"{panel['title']} {target['refId']}": target["expr"]
        for panel in board["panels"]
        for target in panel.get("targets", ())
    }
    groups = yaml.safe_load((FOLDER / "prometheus" / "alerts.yml").read_text())["groups"]
    return found | {rule["alert"]: rule["expr"] for group in groups for rule in group["rules"]}


def unknown(queries: dict[str, str], names: set[str]) -> list[str]:
    """Names in queries that no scrape has."""
    words = ((where, word) for where, query in queries.items() for word in _WORD.findall(query))
    return [f"{where}: {word}" for where, word in words if word not in names]


_SELECTOR = re.compile(r"(\w+)\{([^}]*)\}")
_BY = re.compile(r"\bby \(([^)]*)\)")
_OF_SCRAPES = {"job", "instance", "le"}
"""Prometheus adds two, and buckets have the third."""


def unknown_labels(queries: dict[str, str], labels: dict[str, set[str]]) -> list[str]:
    """Labels that a query selects or sums by, and none of its metrics has."""
    found = []
    for where, query in queries.items():
        of_query = {name for word in _WORD.findall(query) for name in labels.get(word, ())}
        asked = {label.strip() for group in _BY.findall(query) for label in group.split(",")}
        found += [f"{where}: {label}" for label in asked - of_query - _OF_SCRAPES]
        for metric, selector in _SELECTOR.findall(query):
            selected = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector))
            missing = selected - labels.get(metric, set()) - _OF_SCRAPES
            found += [f"{where}: {metric} {label}" for label in missing if metric != "up"]
    return found


def lint(text: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["promtool", "check", "metrics"], input=text, capture_output=True, text=True, check=False
    )


async def test_what_is_drawn_and_watched_is_there(tmp_path: Path) -> None:
    scrapes = await scrape(tmp_path, "none")
    queries = expressions()
    assert len(queries) > 40
    labels = scrapes.labels
    names = set(labels)
    assert unknown(queries, names) == []
    assert unknown_labels(queries, labels) == []
    odd = {"x": 'sum by (modle) (tidemill_engine_ready{modle="a"})'}
    assert unknown_labels(odd, labels) == ["x: modle", "x: tidemill_engine_ready modle"]
    wrong = {"x": queries["TidemillCoreSilent"].replace("silence", "silense")}
    assert unknown(wrong, names) == ["x: tidemill_engine_silense_seconds"]
    for name, text in scrapes.open.items():
        families = list(read_open(text))  # raises for what OpenMetrics does not allow
        samples = [sample for family in families for sample in family.samples]
        exemplars = [sample.exemplar for sample in samples if sample.exemplar is not None]
        assert exemplars, name
        assert all(len(one.labels["trace_id"]) == 32 for one in exemplars)
        assert any(
            sample.name == "rpc_server_call_duration_seconds_count" and sample.value
            for sample in samples
        ) is (name == "engine"), "the request came over HTTP, and went on by gRPC"
    assert 'reason="queue_full"' in scrapes.plain["engine"]
    for text in scrapes.plain.values():
        assert re.search(r"^tidemill_event_loop_tasks [1-9]", text, re.MULTILINE)
    assert "vllm" not in "".join(scrapes.plain.values())
    if shutil.which("promtool"):
        for name, text in scrapes.plain.items():
            done = await asyncio.to_thread(lint, text)
            assert (done.returncode, done.stderr) == (0, ""), name
        bad = await asyncio.to_thread(lint, "# TYPE a_count counter\na_count 1\n")
        assert bad.returncode != 0


async def test_the_alias_writes_the_same_numbers_under_other_names(tmp_path: Path) -> None:
    scrapes = await scrape(tmp_path, "vllm")
    for name, text in scrapes.plain.items():
        samples = {
            (s.name, tuple(sorted(s.labels.items()))): s.value
            for family in read_plain(text)
            for s in family.samples
        }
        twins = {key: value for key, value in samples.items() if key[0].startswith("vllm:")}
        assert len(twins) > 50, name
        same = 0
        for (twin, labels), value in twins.items():
            assert ("engine", "0") in labels, "dashboards group by it"
            own = tuple(label for label in labels if label[0] != "engine")
            ours = ("tidemill_" + twin.removeprefix("vllm:"), own)
            same += samples.get(ours) == value
        assert same > 0.8 * len(twins), name
    page = scrapes.plain["frontend"]
    assert '\nhttp_requests_total{handler="/v1/completions",method="POST",status="200"}' in page
    text = scrapes.plain["engine"]
    for name in (
        "vllm:num_requests_waiting{",
        "vllm:num_requests_running{",
        "vllm:kv_cache_usage_perc{",
        "vllm:iteration_tokens_total_bucket{",
        "vllm:request_success_total{",
        "vllm:prefix_cache_queries_total{",
    ):
        assert f"\n{name}" in text, name
    assert re.search(r'vllm:cache_config_info\{block_size="16",.*num_gpu_blocks="64"', text)


@promtool
@pytest.mark.parametrize("verb", ["check", "test"])
def test_rules(verb: str) -> None:
    name = {"check": "alerts.yml", "test": "alerts_test.yml"}[verb]
    command = ["promtool", verb, "rules", name]
    done = subprocess.run(
        command, cwd=FOLDER / "prometheus", capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_dashboard_is_whole() -> None:
    board = json.loads((FOLDER / "grafana" / "tidemill.json").read_text())
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids))
    rows = [panel["title"] for panel in board["panels"] if panel["type"] == "row"]
    assert {"Autoregressive models", "Diffusion models"} <= set(rows)
    for panel in board["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        assert (panel["type"] == "row") is ("targets" not in panel)
        for target in panel.get("targets", ()):
            assert target["datasource"]["uid"] == "${datasource}"

"""A public gateway, unmodified, in front of an engine: SMG (github.com/smg-project/smg).

It finds out by itself what the engine is, fetches the tokenizer, renders templates and parses
answers; `clients/smg` pins its environment. The control puts it before an engine that does not
serve its contract.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
from openai import OpenAI

from tests.conformance.demo import Demo
from tests.e2e.real_stack import START_S, running
from tests.waiting import PATIENCE_S, eventually, free_port

ROOT = Path(__file__).parents[2]
SMG = ROOT / ".clients" / "smg" / "bin" / "smg"
ASK = [{"role": "user", "content": "json: tom 31 rome"}]
TOM = {"name": "tom", "age": 31, "city": "rome"}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
REFUSED_S = 10.0

pytestmark = pytest.mark.conformance


class Gateway(NamedTuple):
    """Where it listens, and the engine behind it."""

    url: str
    engine: Demo

    @property
    def models(self) -> list[str]:
        """Those it has taken an engine for."""
        return [one["id"] for one in self._listed("models", "data")]

    @property
    def tokenizers(self) -> list[str]:
        """Those it has fetched: it lists a model before, and refuses its requests meanwhile."""
        return [one["name"] for one in self._listed("tokenizers", "tokenizers")]

    def _listed(self, path: str, field: str) -> list[dict[str, str]]:
        try:
            answer = httpx.get(f"{self.url}/v1/{path}", timeout=PATIENCE_S)
        except httpx.TransportError:
            return []
        return list(answer.json()[field]) if answer.is_success else []


@contextmanager
def gateway(folder: Path, *flags: str) -> Iterator[Gateway]:
    """An engine with these flags, and the gateway that was told of its address alone."""
    assert SMG.exists(), "no environment? run `make test-conformance`"
    engine_port, port, metrics_port = free_port(), free_port(), free_port()
    log = (folder / "smg.log").open("wb")
    argv = ["--port", str(port), "--worker-urls", f"grpc://127.0.0.1:{engine_port}"]
    argv += ["--host", "127.0.0.1", "--prometheus-host", "127.0.0.1"]
    argv += ["--prometheus-port", str(metrics_port), "--worker-startup-check-interval", "1"]
    with running(folder, "engine", "demo", f"--engine-port={engine_port}", *flags) as engine:
        eventually(lambda: '"ready:' in engine.log, "the engine does not start", START_S)
        process = subprocess.Popen([SMG, "launch", *argv], cwd=folder, stdout=log, stderr=log)
        try:
            address = f"127.0.0.1:{engine_port}"
            yield Gateway(f"http://127.0.0.1:{port}", Demo("", "", address))
        finally:
            process.kill()
            process.wait()
            log.close()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with gateway(tmp_path_factory.mktemp("gateway"), "--vllm-facade") as up:
        eventually(lambda: up.models == ["demo"], "the gateway takes no engine", START_S)
        eventually(lambda: up.tokenizers == ["demo"], "it fetches no tokenizer", START_S)
        yield up


@pytest.fixture
def client(served: Gateway) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{served.url}/v1", api_key="any", max_retries=0) as connected:
        yield connected
    eventually(served.engine.is_idle, "something is left in the engine")


def test_chats(client: OpenAI) -> None:
    whole = client.chat.completions.create(model="demo", messages=ASK, temperature=0)
    assert json.loads(whole.choices[0].message.content) == TOM
    assert whole.choices[0].finish_reason == "stop"
    chunks = list(
        client.chat.completions.create(
            model="demo", messages=ASK, temperature=0, stream=True,
            stream_options={"include_usage": True},
        )
    )  # fmt: skip
    text = "".join(one.choices[0].delta.content or "" for one in chunks if one.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens > 0, "the second time"


def test_stop_strings_choices_and_logprobs(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="demo", messages=ASK, n=2, stop=["31"], temperature=0, logprobs=True, top_logprobs=2
    )
    for choice in answer.choices:
        assert choice.message.content == '{"name": "tom", "age": '
        assert choice.finish_reason == "stop"
        scored = choice.logprobs.content
        assert "".join(one.token for one in scored).startswith('{"name": "tom", "age": ')
        assert all(len(one.top_logprobs) == 2 for one in scored)
        assert all(one.logprob == one.top_logprobs[0].logprob for one in scored), "greedy"


def test_answers_follow_a_schema(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="demo",
        messages=ASK,
        max_tokens=200,
        response_format={"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON}},
    )
    assert json.loads(answer.choices[0].message.content).keys() == {"name", "age"}


def test_completions(client: OpenAI) -> None:
    answer = client.completions.create(model="demo", prompt="abc", max_tokens=5)
    assert answer.usage.completion_tokens == 5 or answer.choices[0].finish_reason == "stop"
    assert answer.usage.prompt_tokens == 3


def test_what_nobody_reads_any_more_is_aborted(client: OpenAI, served: Gateway) -> None:
    aborted = served.engine.num_aborted()
    stream = client.chat.completions.create(
        model="demo", messages=ASK, max_tokens=1900, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    eventually(lambda: served.engine.num_aborted() > aborted, "the engine goes on")


def test_it_sees_the_load(served: Gateway) -> None:
    def workers() -> list[dict]:
        return list(httpx.get(f"{served.url}/workers", timeout=PATIENCE_S).json()["workers"])

    eventually(lambda: "engine_load" in workers()[0], "the gateway asks for no load")
    (worker,) = workers()
    assert worker["is_healthy"]
    assert (worker["runtime_type"], worker["connection_mode"]) == ("vllm", "grpc")
    assert worker["labels"]["max_num_seqs"] == "64"
    assert worker["engine_load"]["loads"][0]["max_total_num_tokens"] > 0


def test_control_an_engine_without_the_contract_is_not_taken(tmp_path: Path) -> None:
    with gateway(tmp_path) as up:
        deadline = time.monotonic() + REFUSED_S
        while time.monotonic() < deadline:
            assert up.models == []
            time.sleep(0.5)

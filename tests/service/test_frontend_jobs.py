"""Texts that are asked for now and fetched later, at a real server; the engine is a fake."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from typing import Any

import httpx
import pytest

from frontend.request import TextRequest
from tests.service.frontends import frontend_for, stack, until
from tests.waiting import PATIENCE_S, http_client
from tidemill.runtime.errors import Overloaded


async def finished(client: httpx.AsyncClient, name: str) -> dict[str, Any]:
    """A result, as soon as there is one."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            answer = await client.get(f"/v1/result/{name}")
            assert answer.status_code == 200, answer.text
            if answer.json()["status"] != "running":
                return dict(answer.json())
            await asyncio.sleep(0.01)


async def submitted(client: httpx.AsyncClient, path: str, **body: Any) -> list[str]:
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    content = answer.json()
    assert content["status"] == "submitted"
    return list(content["request_ids"])


async def test_one_text(tmp_path: Path) -> None:
    async with (
        stack(tmp_path, engine={"hold": True}) as served,
        served.http() as client,
    ):
        (name,) = await submitted(client, "/v1/generate", prompt="tide")
        await until(lambda: served.engine.live == 1)
        (spec,) = served.engine.submits
        waiting = (await client.get(f"/v1/result/{name}")).json()
        assert waiting == {"request_id": name, "status": "running", "text": None}
        served.engine.hold = False
        result = await finished(client, name)
        assert (await client.get(f"/v1/result/{name}")).json() == result
    assert (spec.sampling.max_tokens, spec.sampling.temperature, spec.request_id) == (32, 0.0, name)
    assert spec.sampling.HasField("temperature")
    assert (result["request_id"], result["status"]) == (name, "finished")
    assert (result["text"], result["finish_reason"]) == ("tide" * 8, "length")
    assert result["usage"]["completion_tokens"] == 32


async def test_a_batch_and_its_parameters(tmp_path: Path) -> None:
    async with stack(tmp_path) as served, served.http() as client:
        names = await submitted(
            client,
            "/v1/generate_batch",
            model="fake",
            prompts=["ab", "cde", "f<|eos|>"],
            temperature=0.5,
            gen_length=5,
            seed=-1,
            decoding={"params": {"steps": 5}},
            nobody_knows=1,
        )
        results = [await finished(client, name) for name in names]
        specs = served.engine.submits
    assert [result["text"] for result in results] == ["ababa", "cdecd", "f"]
    assert [result["finish_reason"] for result in results] == ["length", "length", "stop"]
    assert {spec.request_id for spec in specs} == set(names)
    for spec in specs:
        assert (spec.sampling.temperature, spec.sampling.max_tokens) == (0.5, 5)
        assert spec.sampling.seed == 2**64 - 1
        assert dict(spec.decoding.params) == {"steps": 5}


async def test_failures_are_results(tmp_path: Path) -> None:
    async with stack(tmp_path) as served, served.http() as client:
        (name,) = await submitted(client, "/v1/generate", prompt="a" * 600)
        long = await finished(client, name)
        served.engine.refuse = Overloaded("1024 requests are waiting")
        (name,) = await submitted(client, "/v1/generate", prompt="a")
        refused = await finished(client, name)
    assert (long["status"], long["text"]) == ("failed", None)
    assert long["error"]["code"] == "context_length_exceeded"
    assert (refused["status"], refused["error"]["code"]) == ("failed", "queue_full")


async def test_a_text_can_be_given_up(tmp_path: Path) -> None:
    async with (
        stack(tmp_path, engine={"hold": True}) as served,
        served.http() as client,
    ):
        (name,) = await submitted(client, "/v1/generate", prompt="a")
        await until(lambda: served.engine.live == 1)
        assert (await client.delete(f"/v1/result/{name}")).status_code == 200
        await until(lambda: served.engine.outcomes == ["aborted"])
        assert served.frontend.desk.num_live == 0
        for verb in ("GET", "DELETE"):
            answer = await client.request(verb, f"/v1/result/{name}")
            assert answer.status_code == 404
            assert "longer ago than 3600 s, deleted" in answer.json()["error"]["message"]


async def test_a_result_stands_where_it_was_asked_for(tmp_path: Path) -> None:
    async with stack(tmp_path) as served, served.http() as client:
        (name,) = await submitted(client, "/v1/generate", prompt="a")
        port = int(served.frontend.desk.config.engine.rpartition(":")[2])
        async with frontend_for(port) as other:
            url = f"http://127.0.0.1:{other.http_port}"
            async with http_client(url) as elsewhere:
                missing = await elsewhere.get(f"/v1/result/{name}")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "held_by_another_frontend"
    assert served.frontend.desk.replica in missing.json()["error"]["message"]


async def test_too_much_at_once_is_refused_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("frontend.api.jobs.MAX_RESULTS", 3)
    async with (
        stack(tmp_path, engine={"hold": True}) as served,
        served.http() as client,
    ):
        first = await submitted(client, "/v1/generate_batch", prompts=["a", "b"])
        await until(lambda: served.engine.live == 2)
        answer = await client.post("/v1/generate_batch", json={"prompts": ["c", "d"]})
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        (third,) = await submitted(client, "/v1/generate", prompt="e")
        served.engine.hold = False
        results = [await finished(client, name) for name in (*first, third)]
        assert [result["text"][0] for result in results] == ["a", "b", "e"]
        assert len(served.engine.submits) == 3
        await submitted(client, "/v1/generate", prompt="f")
        assert (await client.get(f"/v1/result/{first[0]}")).status_code == 404
        assert (await client.get(f"/v1/result/{third}")).status_code == 200


async def test_a_batch_that_is_refused_costs_nobody_a_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is finished gives way to what is begun, and not to what is not begun after all."""
    monkeypatch.setattr("frontend.api.jobs.MAX_RESULTS", 4)
    async with stack(tmp_path) as served, served.http() as client:
        done = await submitted(client, "/v1/generate_batch", prompts=["a", "b"])
        results = [await finished(client, name) for name in done]
        served.engine.hold = True
        await submitted(client, "/v1/generate_batch", prompts=["c", "d"])
        answer = await client.post("/v1/generate_batch", json={"prompts": ["e", "f", "g"]})
        assert answer.status_code == 429, answer.text
        assert [await finished(client, name) for name in done] == results


async def test_knobs_count_as_much_as_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("frontend.api.jobs.MAX_BYTES", 10_000)
    async with (
        stack(tmp_path, engine={"hold": True}) as served,
        served.http() as client,
    ):
        knobs = {"params": {"word": 20_000 * "a"}}
        answer = await client.post("/v1/generate", json={"prompt": "a", "decoding": knobs})
        assert answer.status_code == 429, answer.text


async def test_what_was_asked_for_is_not_kept_with_its_result(tmp_path: Path) -> None:
    """Of 4,096 failed ones with 4 MB of knobs each it would be 16 GB, for an hour."""
    async with stack(tmp_path) as served, served.http() as client:
        served.engine.refuse = Overloaded("1024 requests are waiting")
        word = 50 * "knob"
        knobs = {"params": {"word": word}}
        (name,) = await submitted(client, "/v1/generate", prompt="a", decoding=knobs)
        assert (await finished(client, name))["status"] == "failed"
        del knobs
        await until(lambda: not _kept(word))


def _kept(word: str) -> list[TextRequest]:
    gc.collect()
    found = [one for one in gc.get_objects() if type(one) is TextRequest]
    return [one for one in found if one.options.decoding.params.get("word") == word]


ONE: dict[str, tuple[dict[str, Any], int, str]] = {
    "no prompt": ({}, 400, "prompt"),
    "empty": ({"prompt": ""}, 400, "prompt"),
    "several": ({"prompt": ["a"]}, 400, "prompt"),
    "gen_length": ({"prompt": "a", "gen_length": 0}, 400, "gen_length"),
    "max_tokens": ({"prompt": "a", "max_tokens": 4}, 400, "max_tokens"),
    "steps": ({"prompt": "a", "steps": 4}, 400, "steps"),
    "cfg_scale": ({"prompt": "a", "cfg_scale": 1.5}, 400, "cfg_scale"),
    "sparse_config": ({"prompt": "a", "sparse_config": {}}, 400, "sparse_config"),
    "stream": ({"prompt": "a", "stream": True}, 400, "stream"),
    "model": ({"prompt": "a", "model": "gpt-9"}, 404, "model"),
}
MANY: dict[str, tuple[dict[str, Any], int, str]] = {
    "no prompts": ({"prompts": []}, 400, "prompts"),
    "an empty one": ({"prompts": ["a", ""]}, 400, "prompts"),
    "a text": ({"prompts": "a"}, 400, "prompts"),
}


async def test_wrong_requests(tmp_path: Path) -> None:
    async with stack(tmp_path) as served, served.http() as client:
        for path, table in (("/v1/generate", ONE), ("/v1/generate_batch", MANY)):
            for name, (body, status, param) in table.items():
                answer = await client.post(path, json=body)
                assert answer.status_code == status, (name, answer.text)
                assert answer.json()["error"]["param"] == param, (name, answer.text)
        assert served.engine.submits == []
        assert served.frontend.desk.num_live == 0

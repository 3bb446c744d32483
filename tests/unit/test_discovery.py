"""Where engines are looked for: a list, the system's resolver, and an API server on loopback."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from frontend.fleet.discovery import discovery_of
from frontend.fleet.discovery_dns import DnsDiscovery
from frontend.fleet.discovery_k8s import addresses_of
from tests.waiting import PATIENCE_S, until
from tidemill.runtime.errors import FailedPrecondition

KUBECONFIG = "kubernetes_asyncio.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION"


async def newest(found: AsyncIterator[frozenset[str]]) -> frozenset[str]:
    async with asyncio.timeout(PATIENCE_S):
        return await anext(found)


async def until_found(found: AsyncIterator[frozenset[str]], *wanted: str) -> None:
    while await newest(found) != set(wanted):
        pass


async def test_a_list_is_told_once() -> None:
    source = discovery_of("10.0.0.1:1, unix:/run/engine.sock")
    assert [one async for one in source.watch()] == [{"10.0.0.1:1", "unix:/run/engine.sock"}]


@pytest.mark.parametrize(
    "target", ["", "a:1,", "dns:///name", "dns:///name:http", "k8s:///service:1", "k8s:///a/b"]
)
def test_a_target_that_names_nothing_says_what_to_write(target: str) -> None:
    with pytest.raises(FailedPrecondition, match="write ") as caught:
        discovery_of(target)
    assert caught.value.param == "--engine"


async def test_the_systems_own_resolver() -> None:
    source = discovery_of("dns:///localhost:7")
    found = source.watch()
    assert "127.0.0.1:7" in await newest(found)
    await found.aclose()  # type: ignore[attr-defined]


async def test_records_come_and_go_and_a_broken_resolver_changes_nothing() -> None:
    answers: Iterator[Any] = iter(
        [
            frozenset({"127.0.0.1:7", "[::1]:7"}),
            OSError("no such name"),
            frozenset({"127.0.0.2:7"}),
        ]
    )

    async def resolve(name: str, port: int) -> frozenset[str]:
        assert (name, port) == ("engines", 7)
        answer = next(answers)
        if isinstance(answer, OSError):
            raise answer
        return frozenset(answer)

    source = DnsDiscovery("engines", 7, poll_s=0.01, resolve=resolve)
    found = source.watch()
    assert await newest(found) == {"127.0.0.1:7", "[::1]:7"}
    task = asyncio.ensure_future(newest(found))
    await asyncio.sleep(0)
    assert await task == {"127.0.0.2:7"}, "the failure in between was no answer"
    assert source.last_error == ""
    await found.aclose()  # type: ignore[attr-defined]


async def test_what_is_no_name_is_told_and_asked_again() -> None:
    source = discovery_of("dns:///no..name:7")
    asked = asyncio.ensure_future(newest(source.watch()))
    await until(lambda: asked.done() or source.last_error)
    assert not asked.done()
    assert source.last_error.startswith("cannot resolve no..name: ")
    asked.cancel()


def endpoint(host: str, **conditions: bool) -> dict[str, Any]:
    return {"addresses": [host], "conditions": conditions}


def slice_of(name: str, *endpoints: dict[str, Any], version: int = 1) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "resourceVersion": str(version)},
        "addressType": "IPv4",
        "ports": [{"name": "grpc", "port": 50061}],
        "endpoints": list(endpoints),
    }


def test_only_ready_endpoints_that_are_not_terminating() -> None:
    one = slice_of(
        "a",
        endpoint("10.0.0.1", ready=True),
        endpoint("10.0.0.2", ready=False),
        endpoint("10.0.0.3", ready=True, terminating=True, serving=True),
        endpoint("10.0.0.4"),
        endpoint("fd00::5", ready=True),
    )
    wanted = {"10.0.0.1:50061", "10.0.0.4:50061", "[fd00::5]:50061"}
    assert addresses_of([one], "grpc") == wanted
    assert addresses_of([one], "7") == {f"{one.rpartition(':')[0]}:7" for one in wanted}
    assert addresses_of([one], "http") == set()
    assert addresses_of([{"endpoints": None, "ports": None}], "grpc") == set()


class ApiServer:
    """Lists and watches endpoint slices as the API does; `events` go to watchers as they come."""

    def __init__(self) -> None:
        self.slices: dict[str, dict[str, Any]] = {}
        self.version = 1
        self.asked: list[dict[str, str]] = []
        self.events: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(dict(request.query))
        if request.query.get("watch") is None:
            meta = {"resourceVersion": str(self.version)}
            return web.json_response({"metadata": meta, "items": list(self.slices.values())})
        stream = web.StreamResponse()
        await stream.prepare(request)
        while (event := await self.events.get()) is not None:
            await stream.write(json.dumps(event).encode() + b"\n")
        return stream

    @property
    def watches(self) -> list[str]:
        """The versions that watches began from."""
        return [one["resourceVersion"] for one in self.asked if "watch" in one]


@asynccontextmanager
async def api_server(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ApiServer]:
    api, app = ApiServer(), web.Application()
    path = "/apis/discovery.k8s.io/v1/namespaces/prod/endpointslices"
    app.router.add_get(path, api.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "c",
        "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
        "users": [{"name": "u", "user": {}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
    }
    (folder / "kubeconfig").write_text(json.dumps(config))
    monkeypatch.setattr(
        KUBECONFIG,
        str(folder / "kubeconfig"),
    )
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    try:
        yield api
    finally:
        api.events.put_nowait(None)
        await runner.cleanup()


async def test_slices_are_listed_watched_resumed_and_listed_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with api_server(tmp_path, monkeypatch) as api:
        api.slices["a"] = slice_of("a", endpoint("10.0.0.1", ready=True))
        source = discovery_of("k8s:///prod/engines:grpc")
        found = source.watch()
        assert await newest(found) == {"10.0.0.1:50061"}
        assert api.asked[0]["labelSelector"] == "kubernetes.io/service-name=engines"

        more = slice_of("b", endpoint("10.0.0.2", ready=True), version=2)
        api.events.put_nowait({"type": "ADDED", "object": more})
        await until_found(found, "10.0.0.1:50061", "10.0.0.2:50061")
        gone = slice_of("a", endpoint("10.0.0.1", ready=True, terminating=True), version=3)
        api.events.put_nowait({"type": "MODIFIED", "object": gone})
        await until_found(found, "10.0.0.2:50061")

        api.events.put_nowait(None)  # the server ends a watch now and then
        api.events.put_nowait({"type": "DELETED", "object": more | slice_of("b", version=4)})
        await until_found(found)
        assert api.watches == ["1", "3"], "resumed where it was"

        api.slices = {"c": slice_of("c", endpoint("10.0.0.3", ready=True), version=9)}
        api.version = 9
        expired = {"code": 410, "reason": "Expired", "message": "too old resource version"}
        api.events.put_nowait({"type": "ERROR", "object": expired})
        await until_found(found, "10.0.0.3:50061")
        assert source.last_error == ""
        await found.aclose()  # type: ignore[attr-defined]


async def test_a_watch_that_breaks_is_told_and_listed_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An event may be lost with it: going on from the last one would not tell of it."""
    monkeypatch.setattr("frontend.fleet.discovery_k8s._PAUSE_S", 0.01)
    async with api_server(tmp_path, monkeypatch) as api:
        source = discovery_of("k8s:///prod/engines:grpc")
        found = source.watch()
        assert await newest(found) == set()
        api.slices["a"] = slice_of("a", endpoint("10.0.0.1", ready=True), version=2)
        broken = {"code": 500, "reason": "InternalError", "message": "etcd"}
        api.events.put_nowait({"type": "ERROR", "object": broken})
        await until_found(found, "10.0.0.1:50061")
        assert source.last_error == ""
        assert "cannot watch endpoint slices" in caplog.text
        await found.aclose()  # type: ignore[attr-defined]


async def test_without_a_cluster_it_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setattr(KUBECONFIG, str(tmp_path / "none"))
    with pytest.raises(FailedPrecondition, match="KUBECONFIG"):
        await newest(discovery_of("k8s:///prod/engines:grpc").watch())


async def test_an_api_server_that_is_gone_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One that ends neither its watch nor the connection, as when its host has died."""
    for name, seconds in {"_PAUSE_S": 0.01, "_WATCH_S": 0, "_ANSWER_S": 0.5}.items():
        monkeypatch.setattr(f"frontend.fleet.discovery_k8s.{name}", seconds)
    async with api_server(tmp_path, monkeypatch) as api:
        source = discovery_of("k8s:///prod/engines:grpc")
        found = source.watch()
        assert await newest(found) == set()
        api.slices["a"] = slice_of("a", endpoint("10.0.0.1", ready=True), version=2)
        await until_found(found, "10.0.0.1:50061")
        assert len(api.watches) >= 1
        await found.aclose()  # type: ignore[attr-defined]

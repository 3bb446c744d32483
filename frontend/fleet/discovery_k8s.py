"""Engines that are the endpoints of a Kubernetes Service: its EndpointSlices, watched.

Only the service account's right to list and watch endpointslices is needed. It does not know
engines.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from typing import Any

from tidemill.runtime.errors import FailedPrecondition

_LOG = logging.getLogger("tidemill.frontend.fleet")
_LABEL = "kubernetes.io/service-name"
_WATCH_S = 240
"""How long one watch lasts before it is resumed; servers end them at five minutes by themselves."""
_ANSWER_S = 30
"""Until an answer is there, and behind a watch's end: a server that is gone ends nothing itself."""
_PAUSE_S = 2.0
_GONE = 410


def addresses_of(slices: list[dict[str, Any]], port: str) -> frozenset[str]:
    """Endpoints that are ready and not terminating, as host:port; `port` is a number or the name of
    a port. What a condition does not say counts as ready, as the API asks for."""
    found = set()
    for one in slices:
        if port.isdecimal():
            number: int | None = int(port)
        else:
            named = (given for given in one.get("ports") or () if given.get("name") == port)
            number = next((given.get("port") for given in named), None)
        if number is None or one.get("addressType") == "FQDN":
            continue
        for endpoint in one.get("endpoints") or ():
            conditions = endpoint.get("conditions") or {}
            if conditions.get("ready") is False or conditions.get("terminating"):
                continue
            for host in endpoint.get("addresses", [])[:1]:
                found.add(f"[{host}]:{number}" if ":" in host else f"{host}:{number}")
    return frozenset(found)


class KubernetesDiscovery:
    """Lists the slices, then watches from that version on; lists anew when that fails, or when the
    version is gone."""

    def __init__(self, namespace: str, service: str, port: str) -> None:
        self._namespace, self._port = namespace, port
        self._selector = f"{_LABEL}={service}"
        self._slices: dict[str, dict[str, Any]] = {}
        self._version = ""
        self.last_error = ""

    async def watch(self) -> AsyncIterator[frozenset[str]]:
        """After every list and every event. Raises FailedPrecondition without a cluster."""
        kubernetes = await _kubernetes()
        async with kubernetes.client.ApiClient() as client:
            api = kubernetes.client.DiscoveryV1Api(client)
            while True:
                try:
                    if not self._version:
                        await self._list(api)
                        self.last_error = ""
                        yield self._addresses()
                    async with kubernetes.watch.Watch(return_type="object") as watch:
                        async for _ in self._follow(api, watch):
                            yield self._addresses()
                except Exception as failure:  # of aiohttp, of the API, of JSON: ask again
                    self._version = ""  # an event may be lost, or be one that cannot be read
                    if getattr(failure, "status", None) != _GONE:
                        self._failed(failure)
                        await asyncio.sleep(_PAUSE_S)

    def _addresses(self) -> frozenset[str]:
        return addresses_of(list(self._slices.values()), self._port)

    def _failed(self, failure: Exception) -> None:
        """The addresses known stay: what serves is seen by sessions, not by this API."""
        error = f"cannot watch endpoint slices: {type(failure).__name__}: {failure}"
        if error != self.last_error:
            _LOG.warning(error)
        self.last_error = error

    async def _list(self, api: Any) -> None:
        answer = await api.list_namespaced_endpoint_slice(
            self._namespace,
            label_selector=self._selector,
            _preload_content=False,
            _request_timeout=_ANSWER_S,
        )
        async with answer:
            if answer.status != 200:
                raise OSError(f"status {answer.status}: {(await answer.text())[:200]}")
            found = await answer.json()
        self._slices = {one["metadata"]["name"]: one for one in found.get("items") or ()}
        self._version = found["metadata"]["resourceVersion"]

    async def _follow(self, api: Any, watch: Any) -> AsyncIterator[None]:
        """Takes over events, until the server ends the watch. Raises what the server answers."""
        events = watch.stream(
            api.list_namespaced_endpoint_slice,
            self._namespace,
            label_selector=self._selector,
            resource_version=self._version,
            allow_watch_bookmarks=True,
            timeout_seconds=_WATCH_S,
            _request_timeout=_WATCH_S + _ANSWER_S,
        )
        async for event in events:
            found = event["raw_object"]
            self._version = found["metadata"]["resourceVersion"]
            name = found["metadata"].get("name", "")
            if event["type"] == "DELETED":
                self._slices.pop(name, None)
            elif event["type"] != "BOOKMARK":
                self._slices[name] = found
            yield


async def _kubernetes() -> Any:
    """The client library, set up for the cluster around this pod, or as KUBECONFIG says."""
    try:
        import kubernetes_asyncio.watch
    except ModuleNotFoundError as missing:
        raise FailedPrecondition(
            f"--engine k8s:/// needs {missing.name}: pip install 'tidemill[kubernetes]'",
            reason="NOT_INSTALLED",
            param="--engine",
        ) from missing
    kubernetes: Any = kubernetes_asyncio
    try:
        if os.environ.get("KUBERNETES_SERVICE_HOST"):
            kubernetes.config.load_incluster_config()
        else:
            await kubernetes.config.load_kube_config()
    except kubernetes.config.ConfigException as failure:
        raise FailedPrecondition(
            f"--engine k8s:/// found no cluster: {failure}; run in a pod, or set KUBECONFIG",
            reason="NO_CLUSTER",
            param="--engine",
        ) from failure
    return kubernetes

"""Which engines there are: `--engine` names a list, a DNS name or a Kubernetes Service.

It does not know engines, only their addresses.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from frontend.fleet.discovery_dns import DnsDiscovery
from frontend.fleet.discovery_k8s import KubernetesDiscovery
from frontend.fleet.discovery_static import StaticDiscovery
from tidemill.runtime.errors import FailedPrecondition

_DNS, _KUBERNETES = "dns:///", "k8s:///"


class Discovery(Protocol):
    """A source of addresses. `last_error` says what is wrong with it now, '' nothing."""

    last_error: str

    def watch(self) -> AsyncIterator[frozenset[str]]:
        """All addresses that take new work, and again whenever they may have changed. Does not end
        while they can change, and keeps quiet when it cannot know."""
        ...


def discovery_of(target: str) -> Discovery:
    """The source that `target` names. Raises FailedPrecondition for one that names none."""
    if target.startswith(_DNS):
        host, _, port = target.removeprefix(_DNS).rpartition(":")
        if host and _is_port(port):
            return DnsDiscovery(host.strip("[]"), int(port))
        raise _malformed(target, "dns:///NAME:PORT")
    if target.startswith(_KUBERNETES):
        where, _, port = target.removeprefix(_KUBERNETES).rpartition(":")
        namespace, _, service = where.partition("/")
        if namespace and service and "/" not in service and port:
            return KubernetesDiscovery(namespace, service, port)
        raise _malformed(target, "k8s:///NAMESPACE/SERVICE:PORT (a number or a port's name)")
    addresses = [one.strip() for one in target.split(",")]
    if not all(addresses):
        raise _malformed(target, "HOST:PORT, or several with commas between them")
    return StaticDiscovery(addresses)


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdigit() and 0 < int(text) < 1 << 16


def _malformed(target: str, form: str) -> FailedPrecondition:
    return FailedPrecondition(
        f"--engine is {target!r}, which names no engines; write {form}",
        reason="BAD_ENGINE_TARGET",
        param="--engine",
    )

"""Every overlay renders, is valid for Kubernetes, and its parts fit each other."""

from __future__ import annotations

import copy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.deploy import flags, manifests
from tests.deploy.manifests import OVERLAYS, VERSIONS, Pod, Resource, name_of, of_kind, render

MARGIN_S = 10
FREE = {"annotations", "emptyDir", "labels", "limits", "matchLabels", "requests"}
"""Fields whose keys are anybody's choice."""
WANTED = {
    "canary": {"HTTPRoute", "GRPCRoute"},
    "inference-pool": {"InferencePool", "HTTPRoute"},
    "mesh": {"PeerAuthentication", "AuthorizationPolicy", "VirtualService", "DestinationRule"},
    "multi-node": {"LeaderWorkerSet"},
    "replicas": {"HorizontalPodAutoscaler", "ScaledObject", "ServiceMonitor", "Role"},
}
NAME, COMPONENT = "app.kubernetes.io/name", "app.kubernetes.io/component"
OUTSIDERS = (
    ("metrics", {"kubernetes.io/metadata.name": "monitoring"}, {NAME: "prometheus"}),
    ("grpc-admin", {}, {NAME: "tidemill", COMPONENT: "operator"}),
)
"""Ports of engines, and the labels of who may reach them: of the namespace, and of the pod."""
every_overlay = pytest.mark.parametrize("overlay", OVERLAYS)


def test_the_overlays() -> None:
    names = {"single-node", "demo", "mtls", "tensor-parallel", "prefill-decode", *WANTED}
    assert set(OVERLAYS) == names
    for overlay, kinds in WANTED.items():
        assert kinds <= {resource["kind"] for resource in render(overlay)}
    every = {f"{r['kind']} {r['apiVersion']}" for overlay in OVERLAYS for r in render(overlay)}
    assert set(manifests.CUSTOM) <= every, "a schema that nothing is checked with"


@pytest.mark.parametrize("version", VERSIONS)
@every_overlay
def test_valid(overlay: str, version: str) -> None:
    for resource in render(overlay):
        manifests.check(resource, version)


def renamed(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The value with one field after the other misspelt, and where."""
    if isinstance(value, dict):
        for key, inner in value.items():
            changed = {k: v for k, v in value.items() if k != key} | {f"{key}x": inner}
            yield f"{path}.{key}", changed
            if key not in FREE:
                for where, other in renamed(inner, f"{path}.{key}"):
                    yield where, value | {key: other}
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            for where, other in renamed(inner, f"{path}[{index}]"):
                yield where, [*value[:index], other, *value[index + 1 :]]


def is_valid(resource: Resource) -> bool:
    try:
        manifests.check(resource, VERSIONS[-1])
    except jsonschema.ValidationError:
        return False
    return True


@pytest.mark.parametrize("kind", [*manifests.CUSTOM, "StatefulSet apps/v1", "Service v1"])
def test_any_misspelt_field_is_seen(kind: str) -> None:
    resource = next(
        resource
        for overlay in OVERLAYS
        for resource in render(overlay)
        if f"{resource['kind']} {resource['apiVersion']}" == kind and resource["spec"]
    )
    if kind == "Service v1":  # whose selector has anybody's keys
        del resource["spec"]["selector"]
    if kind.startswith("LeaderWorkerSet"):  # pods are the turn of the StatefulSet
        for role in ("leaderTemplate", "workerTemplate"):
            pod = {"containers": [{"name": "engine", "image": "tidemill-engine:1"}]}
            resource["spec"]["leaderWorkerTemplate"][role]["spec"] = pod
    misspelt = {where: resource | {"spec": spec} for where, spec in renamed(resource["spec"])}
    assert len(misspelt) > 1
    assert [where for where, changed in misspelt.items() if is_valid(changed)] == []


@every_overlay
def test_pods_are_closed(overlay: str) -> None:
    resources = render(overlay)
    reads_api = {r["metadata"]["name"] for r in of_kind(resources, "RoleBinding")}
    for pod in manifests.pods(resources):
        outer = pod.spec["securityContext"]
        assert outer["runAsNonRoot"] is True, pod.owner
        assert outer["runAsUser"] == 65532
        assert outer["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod.spec["enableServiceLinks"] is False
        account = pod.spec["serviceAccountName"]
        assert account in {name_of(r) for r in of_kind(resources, "ServiceAccount")}
        assert pod.spec["automountServiceAccountToken"] is (account in reads_api)
        for container in pod.containers:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert {"cpu", "memory"} <= container["resources"]["requests"].keys()
            assert "memory" in container["resources"]["limits"]
            name, _, tag = container["image"].partition(":")
            assert name in ("tidemill-frontend", "tidemill-engine")
            assert tag not in ("", "latest")
            mounted = [mount["mountPath"] for mount in container["volumeMounts"]]
            assert flags.unwritable(name.removeprefix("tidemill-"), mounted) == []


def drain_s(pod: Pod, resources: list[Resource]) -> float:
    """How long the slowest container takes from SIGTERM to its end."""
    slowest = 0.0
    for container in pod.containers:
        environ = manifests.environment(container, resources)
        sleep = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        pause = float(environ.get("TIDEMILL_DRAIN_PAUSE_S", 0))
        timeout = float(environ.get("TIDEMILL_DRAIN_TIMEOUT_S", 30))
        slowest = max(slowest, sleep + pause + timeout)
    return slowest


@every_overlay
def test_termination_outlasts_the_drain(overlay: str) -> None:
    resources = render(overlay)
    for pod in manifests.pods(resources):
        assert pod.spec["terminationGracePeriodSeconds"] >= drain_s(pod, resources) + MARGIN_S


def probing(pods: list[Pod]) -> Iterator[tuple[Pod, dict[str, Any]]]:
    """Containers that others talk to; workers of a group are not."""
    for pod in pods:
        for container in pod.containers:
            if container.get("ports"):
                yield pod, container


@every_overlay
def test_probes_ask_the_plain_health_port(overlay: str) -> None:
    resources = render(overlay)
    found = 0
    for pod, container in probing(manifests.pods(resources)):
        port = int(manifests.environment(container, resources)["TIDEMILL_HEALTH_PORT"])
        for probe, names in (
            ("startupProbe", ("readiness", "liveness")),
            ("livenessProbe", ("liveness",)),
            ("readinessProbe", ("readiness",)),
        ):
            asked = container[probe]["grpc"]
            assert asked["port"] == port, f"{pod.owner} {probe}"
            assert asked["service"] in names
        found += 1
    assert found >= 2


@every_overlay
def test_services_and_policies_find_their_pods(overlay: str) -> None:
    resources = render(overlay)
    every = manifests.pods(resources)
    for service in of_kind(resources, "Service"):
        chosen = [pod for pod in every if pod.matches(service["spec"]["selector"])]
        is_of_roles = (overlay, name_of(service)) == ("prefill-decode", "tidemill-engine-pods")
        owners = [pod.owner for pod in chosen]
        assert len(owners) == 1 + is_of_roles, f"{name_of(service)} selects {owners}"
        for port in service["spec"]["ports"]:
            assert all(port["targetPort"] in pod.ports() for pod in chosen), name_of(service)
            assert port["appProtocol"] in ("grpc", "http")
    for policy in of_kind(resources, "NetworkPolicy"):
        chosen = [pod for pod in every if pod.matches(policy["spec"]["podSelector"]["matchLabels"])]
        assert chosen, name_of(policy)
        for rule in policy["spec"]["ingress"]:
            for port in rule.get("ports", []):
                assert port["port"] in chosen[0].ports(), f"{name_of(policy)}: {port}"
    for budget in of_kind(resources, "PodDisruptionBudget"):
        selector = budget["spec"]["selector"]["matchLabels"]
        assert any(pod.matches(selector) for pod in every), name_of(budget)


def admitted(resources: list[Resource], port: str) -> list[dict[str, Any]]:
    """Who may reach a port of engines: the peers of the rules that name it, {} for anybody."""
    rules = [
        rule
        for policy in of_kind(resources, "NetworkPolicy")
        if policy["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "engine"
        for rule in policy["spec"]["ingress"]
        if port in {chosen["port"] for chosen in rule.get("ports", [])}
    ]
    return [peer for rule in rules for peer in rule.get("from", [{}])]


OTHERWISE = {"inference-pool", "prefill-decode"}
"""Overlays whose engines are reached by others too, or in another way."""


@pytest.mark.parametrize("overlay", [name for name in OVERLAYS if name not in OTHERWISE])
def test_engines_are_for_frontends_alone(overlay: str) -> None:
    resources = render(overlay)
    frontends = [pod for pod in manifests.pods(resources) if "frontend" in pod.owner]
    for peer in admitted(resources, "grpc"):
        labels = peer["podSelector"]["matchLabels"]
        assert labels["app.kubernetes.io/component"] == "frontend"
        assert "namespaceSelector" not in peer
        assert len([pod for pod in frontends if pod.matches(labels)]) == 1
    assert len(admitted(resources, "grpc")) == len(frontends)
    check_outsiders(resources)


def check_outsiders(resources: list[Resource]) -> None:
    # These pods are not ours: their labels are those that k8s/README.md names, and no others.
    for port, namespace, labels in OUTSIDERS:
        peers = admitted(resources, port)
        assert peers
        for peer in peers:
            assert peer.get("namespaceSelector", {}).get("matchLabels", {}) == namespace
            assert peer["podSelector"]["matchLabels"] == labels


def test_decode_engines_reach_prefill_engines_and_nobody_those_that_decode() -> None:
    resources = render("prefill-decode")
    every = manifests.pods(resources)
    found = {}
    for policy in of_kind(resources, "NetworkPolicy"):
        (own,) = [pod for pod in every if pod.matches(policy["spec"]["podSelector"]["matchLabels"])]
        callers = [
            pod.owner
            for peer in (admitted([policy], "grpc") if "engine" in own.owner else [])
            for pod in every
            if pod.matches(peer["podSelector"]["matchLabels"]) and "namespaceSelector" not in peer
        ]
        found[own.owner] = sorted(callers)
    frontend, prefill, decode = (
        "Deployment/tidemill-frontend",
        "StatefulSet/tidemill-engine-prefill",
        "StatefulSet/tidemill-engine-decode",
    )
    assert found == {frontend: [], prefill: [frontend, decode], decode: [frontend]}
    check_outsiders(resources)


def test_a_pod_of_the_pool_shows_its_frontend_alone() -> None:
    resources = render("inference-pool")
    assert admitted(resources, "http") == [{}]
    assert admitted(resources, "grpc") == []


def test_tracks_of_a_canary_do_not_mix() -> None:
    resources = render("canary")
    every = manifests.pods(resources)
    assert {pod.labels["tidemill/track"] for pod in every} == {"stable", "new"}
    for policy in of_kind(resources, "NetworkPolicy"):
        (own,) = {
            pod.labels["tidemill/track"]
            for pod in every
            if pod.matches(policy["spec"]["podSelector"]["matchLabels"])
        }
        for rule in policy["spec"]["ingress"]:
            for peer in rule.get("from", []):
                labels = peer["podSelector"]["matchLabels"]
                if labels.get(COMPONENT) == "frontend":
                    assert labels["tidemill/track"] == own


def test_the_linter_is_content(tmp_path: Path) -> None:
    found = Path(sys.executable).parent / "yamllint"
    linter = str(found) if found.exists() else shutil.which("yamllint")
    if linter is None:
        pytest.skip("no yamllint: pip install yamllint")
    rules = "{extends: default, rules: {line-length: {max: 110}, document-start: disable}}"
    command = [linter, "--strict", "-d", rules]
    done = subprocess.run([*command, str(manifests.K8S)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    broken = tmp_path / "broken.yaml"
    broken.write_text("a: 1\na: 2\n")
    assert (
        "duplication" in subprocess.run([*command, broken], capture_output=True, text=True).stdout
    )


def test_a_broken_copy_is_refused() -> None:
    """The checks above see what they are for."""
    resources = copy.deepcopy(render("single-node"))
    engine = next(pod for pod in manifests.pods(resources) if "engine" in pod.owner)
    assert drain_s(engine, resources) + MARGIN_S <= 150
    engine.spec["containers"][0]["lifecycle"] = {"preStop": {"sleep": {"seconds": 30}}}
    assert drain_s(engine, resources) + MARGIN_S > 150

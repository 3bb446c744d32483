"""Flags, addresses, metrics and gRPC services that the manifests name are the product's own."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import Any

import pytest

from engine_service.nodes import node_of
from frontend.api.grpc_oip import OipServicer
from frontend.api.grpc_text import TextServicer
from tests.deploy import flags, manifests
from tests.deploy.manifests import OVERLAYS, ROOT, Resource, name_of, of_kind, render

OF_FRONTENDS = {f"/{one.contract.full_name}/*" for one in (TextServicer, OipServicer)}
every_overlay = pytest.mark.parametrize("overlay", OVERLAYS)


def configs(resources: list[Resource], service: str) -> list[tuple[dict[str, Any], Any]]:
    """Containers of a service and what they run with."""
    return [
        (container, flags.read(service, container.get("args", []), environ))
        for pod in manifests.pods(resources)
        for container in pod.containers
        if container["image"].startswith(f"tidemill-{service}:")
        for environ in [manifests.environment(container, resources)]
    ]


@every_overlay
def test_flags_exist_and_name_the_ports(overlay: str) -> None:
    resources = render(overlay)
    for service, names in (
        ("engine", ("engine_port", "admin_port", "health_port", "metrics_port")),
        ("frontend", ("http_port", "grpc_port", "health_port")),
    ):
        found = configs(resources, service)
        assert found
        for container, config in found:
            declared = {port["containerPort"] for port in container.get("ports", [])}
            assert declared <= {getattr(config, name) for name in names}
    for _, config in configs(resources, "frontend"):
        assert config.drain_pause_s > 0


def test_the_pods_of_a_group_share_its_ranks() -> None:
    """As the product reads what they are told, with what LeaderWorkerSet adds."""
    resources = render("multi-node")
    (group,) = of_kind(resources, "LeaderWorkerSet")
    size = group["spec"]["leaderWorkerTemplate"]["size"]
    ranks: list[int] = []
    for index, (container, config) in enumerate(configs(resources, "engine")):
        own = {"LWS_LEADER_ADDRESS": "leader", "LWS_GROUP_SIZE": size, "LWS_WORKER_INDEX": index}
        node = node_of(config, {name: str(value) for name, value in own.items()})
        assert node is not None
        assert node.index == index
        assert len(node.ranks) == int(container["resources"]["limits"]["nvidia.com/gpu"])
        ranks += node.ranks
        (mount,) = (m for m in container["volumeMounts"] if m["name"] == "group")
        assert config.group_token_file == f"{mount['mountPath']}/token"
    assert ranks == list(range(config.tensor_parallel_size))


def test_engines_of_both_roles_fit_and_are_found() -> None:
    """KV is refused between engines that differ in more than this."""
    resources = render("prefill-decode")
    by_role = {config.role: asdict(config) for _, config in configs(resources, "engine")}
    assert by_role.keys() == {"prefill", "decode"}
    apart = {name for name, value in by_role["prefill"].items() if value != by_role["decode"][name]}
    assert apart == {"role", "kv_transfer_timeout_s"}
    assert by_role["decode"]["kv_connector"] == "grpc", "pods share no process namespace"
    services = {name_of(one): one["spec"]["selector"] for one in of_kind(resources, "Service")}
    ((_, frontend),) = configs(resources, "frontend")
    host = frontend.engine.removeprefix("dns:///").partition(":")[0]
    asked = [pod.owner for pod in manifests.pods(resources) if pod.matches(services[host])]
    assert asked == [f"StatefulSet/tidemill-engine-{role}" for role in sorted(by_role)]


@every_overlay
def test_frontends_find_their_engines(overlay: str) -> None:
    resources = render(overlay)
    ports = {
        name_of(service): {port["port"] for port in service["spec"]["ports"]}
        for service in of_kind(resources, "Service")
        if service["spec"].get("clusterIP") == "None"
    }
    for _, config in configs(resources, "frontend"):
        for address in config.engine.split(","):
            host, _, port = address.rpartition("/")[2].rpartition(":")
            if host == "127.0.0.1":  # in the same pod
                assert int(port) == configs(resources, "engine")[0][1].engine_port
                continue
            named = [name for name in ports if name in host.split(".")[:2]]
            assert named, f"{address} is no headless Service"
            assert int(port) in ports[named[0]]


def test_scalers_scale_what_is_there_by_metrics_that_exist() -> None:
    resources = render("replicas")
    workloads = {(r["apiVersion"], r["kind"], name_of(r)): r for r in resources}
    for scaler in of_kind(resources, "HorizontalPodAutoscaler", "ScaledObject"):
        target = scaler["spec"]["scaleTargetRef"]
        found = workloads[target["apiVersion"], target["kind"], target["name"]]
        assert "replicas" not in found["spec"], "two would own the number"
    (engines,) = of_kind(resources, "ScaledObject")
    code = "".join(path.read_text() for path in (ROOT / "engine_service").rglob("*metrics*.py"))
    jobs = {
        endpoint["relabelings"][0]["replacement"]
        for monitor in of_kind(resources, "ServiceMonitor")
        for endpoint in monitor["spec"]["endpoints"]
    }
    for trigger in engines["spec"]["triggers"]:
        query = trigger["metadata"]["query"]
        (metric,) = re.findall(r"tidemill_(\w+)", query)
        assert f'"{metric}"' in code, f"no engine metric {metric}"
        assert set(re.findall(r'job="(.*?)"', query)) <= jobs
        # Else the load of another installation scales this one.
        assert re.findall(r'namespace="(.*?)"', query) == [engines["metadata"]["namespace"]]


def test_every_monitor_scrapes_one_port() -> None:
    resources = render("replicas")
    for monitor in of_kind(resources, "ServiceMonitor"):
        selector = monitor["spec"]["selector"]["matchLabels"]
        for endpoint in monitor["spec"]["endpoints"]:
            services = [
                name_of(service)
                for service in of_kind(resources, "Service")
                if selector.items() <= service["metadata"]["labels"].items()
                and endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
            ]
            assert len(services) == 1, services


def services_of(file: str) -> set[str]:
    text = (ROOT / "proto" / "tidemill" / "v1" / file).read_text()
    return {f"/tidemill.v1.{name}/*" for name in re.findall(r"^service (\w+)", text, re.MULTILINE)}


def test_the_mesh_names_the_services_of_the_contract() -> None:
    resources = render("mesh")
    policies = {name_of(r): r["spec"] for r in of_kind(resources, "AuthorizationPolicy")}
    health = {"/grpc.health.v1.Health/*", "/metrics"}
    for name, served in (
        ("tidemill-engine", services_of("engine.proto")),
        ("tidemill-frontend", OF_FRONTENDS),
    ):
        paths = {
            path
            for rule in policies[name]["rules"]
            for to in rule["to"]
            for path in to["operation"].get("paths", [])
        }
        assert paths - health == served
    rules = policies["tidemill-engine"]["rules"]
    (moving,) = (rule for rule in rules if "KvTransfer" in str(rule["to"]))
    assert moving["from"][0]["source"]["principals"] == ["*/ns/tidemill/sa/tidemill-engine"]
    rules = [rule for rule in rules if rule is not moving]
    callers = {rule["to"][0]["operation"]["ports"][0]: rule["from"][0]["source"] for rule in rules}
    ((_, config),) = configs(resources, "engine")
    assert set(callers) == {
        str(port) for port in (config.engine_port, config.admin_port, config.metrics_port)
    }
    namespace = of_kind(resources, "Namespace")[0]["metadata"]["name"]
    account = of_kind(resources, "Deployment")[0]["spec"]["template"]["spec"]["serviceAccountName"]
    allowed = callers[str(config.engine_port)]["principals"]
    assert allowed == [f"*/ns/{namespace}/sa/{account}"]


def test_the_pool_serves_what_the_picker_reads() -> None:
    resources = render("inference-pool")
    (pool,) = of_kind(resources, "InferencePool")
    chosen = [
        pod
        for pod in manifests.pods(resources)
        if pod.matches(pool["spec"]["selector"]["matchLabels"])
    ]
    ((_, config),) = configs(resources, "frontend")
    assert [target["number"] for target in pool["spec"]["targetPorts"]] == [config.http_port]
    assert chosen[0].labels["llm-d.ai/engine-type"] == config.metrics_alias == "vllm"
    ((container, _),) = configs(resources, "engine")
    # The only engine of a frontend: from when it says that it drains, the frontend refuses.
    assert container["lifecycle"]["preStop"]["sleep"]["seconds"] > config.drain_pause_s


def test_files_of_tls_are_mounted() -> None:
    resources = render("mtls")
    found = 0
    for pod in manifests.pods(resources):
        volumes = {volume["name"]: volume for volume in pod.spec["volumes"]}
        for container in pod.containers:
            mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
            for name, value in manifests.environment(container, resources).items():
                folder, _, file = value.rpartition("/")
                if "_TLS_" in name and folder:
                    assert "secret" in volumes[mounts[folder]], name
                    assert file in ("ca.crt", "tls.crt", "tls.key")
                    found += 1
    assert found == 6


@every_overlay
def test_routes_lead_somewhere(overlay: str) -> None:
    resources = render(overlay)
    there = {
        (resource["kind"], name_of(resource)): resource
        for resource in of_kind(resources, "Service", "InferencePool")
    }
    for route in of_kind(resources, "HTTPRoute", "GRPCRoute"):
        for rule in route["spec"]["rules"]:
            for backend in rule["backendRefs"]:
                found = there[backend.get("kind", "Service"), backend["name"]]
                if "port" in backend:
                    assert backend["port"] in {port["port"] for port in found["spec"]["ports"]}
        if route["kind"] == "GRPCRoute":
            (rule,) = route["spec"]["rules"]
            assert {f"/{one['method']['service']}/*" for one in rule["matches"]} == OF_FRONTENDS

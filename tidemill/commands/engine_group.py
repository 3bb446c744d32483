"""Several engines of one machine: in what their configs differ. It starts nothing but the process
that counts GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine_service.config import EngineConfig
from tidemill.commands.ports import Wish, reachable
from tidemill.ranges import PORT
from tidemill.runtime.errors import FailedPrecondition, InvalidRequest
from tidemill.runtime.options import flag_of

_PORTS = ("engine_port", "admin_port", "health_port", "metrics_port")
_ENDPOINTS = ("kv_events_zmq", "kv_events_replay")
_COUNTER = "engine_service.device_count"


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """How one engine is started: its flags, and variables beside those that are there."""

    config: EngineConfig
    environ: Mapping[str, str]

    @property
    def address(self) -> str:
        """Where this machine reaches its gRPC services."""
        return f"{reachable(self.config.host)}:{self.config.engine_port}"


def engines_of(config: EngineConfig, count: int) -> list[EngineConfig]:
    """`count` engines whose ports and ZeroMQ addresses count up from those of `config`; 0 stays.

    Raises InvalidRequest for a count below 1, for an address that has nothing to count, and where
    ports come to an end.
    """
    if count < 1:
        raise InvalidRequest(
            f"data_parallel_size is {count}; at least 1 engine works", param="data_parallel_size"
        )
    if count > 1 and (config.nnodes > 1 or config.executor in ("torchrun", "lws", "ray")):
        raise InvalidRequest(
            f"data_parallel_size {count} starts engines of this machine, and the ranks of these "
            f"would be on others (executor {config.executor}, nnodes {config.nnodes}): start each "
            "engine by itself, and give a frontend all of them",
            param="data_parallel_size",
        )
    engines = [_numbered(config, number) for number in range(count)]
    owners: dict[str, str] = {}
    for number, one in enumerate(engines):
        for name in _ENDPOINTS:
            if (endpoint := getattr(one, name)) is None:
                continue
            here = f"{name} of {_who(number, count) or 'the engine'}"
            if endpoint in owners:
                raise InvalidRequest(
                    f"{endpoint} would be {here} and {owners[endpoint]}: ports count up per engine,"
                    f" leave {count} or more between kv_events_zmq and kv_events_replay",
                    param=name,
                )
            owners[endpoint] = here
    return engines


def _numbered(config: EngineConfig, number: int) -> EngineConfig:
    changes: dict[str, Any] = {}
    for name in _PORTS:
        if port := getattr(config, name):
            changes[name] = _port(name, port, number)
    for name in _ENDPOINTS:
        if endpoint := getattr(config, name):
            changes[name] = _endpoint(name, endpoint, number)
    return replace(config, **changes)


def _endpoint(name: str, endpoint: str, number: int) -> str:
    """As vLLM numbers those of its data-parallel ranks (ZmqEventPublisher.offset_endpoint_port):
    tcp://*:5557 is followed by tcp://*:5558. What is no TCP gets a suffix."""
    if number == 0:
        return endpoint
    if not endpoint.startswith("tcp://"):
        return f"{endpoint}_dp{number}"
    head, _, port = endpoint.rpartition(":")
    if not port.isdecimal():
        raise InvalidRequest(
            f"{name} is {endpoint!r}, which ends in no port to count up from for each engine; write"
            " one, for example tcp://*:5557",
            param=name,
        )
    return f"{head}:{_port(name, int(port), number)}"


def _port(name: str, first: int, number: int) -> int:
    if (port := first + number) <= PORT.most:
        return port
    raise InvalidRequest(
        f"{name} counts up per engine from {first}, and engine {number} (the first is 0) would get "
        f"{port}: the last port is {PORT.most}; begin lower",
        param=name,
    )


def wishes_of(configs: Sequence[EngineConfig]) -> list[Wish]:
    """The TCP ports that the engines listen on, in the order in which `with_ports` takes them."""
    return [
        Wish(one.host, flag_of(name), getattr(one, name), _who(number, len(configs)))
        for number, one in enumerate(configs)
        for name in _PORTS
        if getattr(one, name) is not None
    ]


def with_ports(configs: Sequence[EngineConfig], found: Sequence[int]) -> list[EngineConfig]:
    """The same engines with the ports that were found for `wishes_of` them."""
    ports = iter(found)
    settled = []
    for one in configs:
        changes: dict[str, Any] = {
            name: next(ports) for name in _PORTS if getattr(one, name) is not None
        }
        settled.append(replace(one, **changes))
    return settled


def _who(number: int, count: int) -> str:
    return f"engine {number} of {count}" if count > 1 else ""


def placed(
    configs: Sequence[EngineConfig],
    count_gpus: Callable[[], int] | None = None,
    environ: Mapping[str, str] = os.environ,
) -> list[EnginePlan]:
    """Each engine with devices of its own: the next GPUs, and a share of the cores for the threads
    that compute on the host (OMP_NUM_THREADS, unless it is set).

    One engine is left as it is. Raises InvalidRequest when there are not enough GPUs, saying how
    many engines would fit.
    """
    if len(configs) == 1:
        return [EnginePlan(configs[0], {})]
    threads = {}
    if "OMP_NUM_THREADS" not in environ:
        num_ranks = sum(one.num_ranks for one in configs)
        share = max(1, len(os.sched_getaffinity(0)) // num_ranks)
        threads = {"OMP_NUM_THREADS": str(share)}
    devices = _devices(configs, count_gpus or counted_gpus)
    return [
        EnginePlan(replace(one, device=device), threads)
        for one, device in zip(configs, devices, strict=True)
    ]


def _devices(configs: Sequence[EngineConfig], count_gpus: Callable[[], int]) -> list[str]:
    config, count = configs[0], len(configs)
    kind, _, first = config.device.partition(":")
    if kind not in ("auto", "cuda") or not (first or "0").isdecimal():
        return [config.device] * count  # the CPU; or one that the engine refuses
    if config.executor == "simulated":
        return [config.device] * count
    here, start, each = count_gpus(), int(first or 0), max(1, config.num_ranks)
    if kind == "auto" and here == 0:
        return ["cpu"] * count
    fitting = max(0, here - start) // each
    if count > fitting:
        there = f"{max(0, here - start)} from {kind}:{start} on" if start else f"{here}"
        raise InvalidRequest(
            f"data_parallel_size {count} with {each} GPU{'s' * (each > 1)} per engine needs"
            f" {count * each} GPUs; there are {there}: "
            + _smaller(fitting, each, max(0, here - start)),
            param="data_parallel_size",
        )
    return [f"cuda:{start + number * each}" for number in range(count)]


def _smaller(fitting: int, each: int, here: int) -> str:
    """What to pass where `fitting` engines of `each` GPUs are too few; there are `here`."""
    ways = [f"pass --data-parallel-size {fitting}"] * (fitting > 0)
    if each > 1 and here > 0:
        sizes = "--data-parallel-size, --tensor-parallel-size and --pipeline-parallel-size"
        ways.append(f"pass {sizes} whose product is at most {here}")
    return ", or ".join([*(ways or ["no engine fits"]), "--device cpu"])


def counted_gpus() -> int:
    """GPUs that an engine started from here would see, CUDA_VISIBLE_DEVICES included. Takes as long
    as loading torch. Raises FailedPrecondition where that cannot be loaded."""
    counter = [sys.executable, "-m", _COUNTER]
    done = subprocess.run(
        counter, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        why = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        raise FailedPrecondition(
            f"GPUs cannot be counted: {why}; an engine needs pip install 'tidemill[engine]', and "
            "--device cpu counts none",
            param="device",
        )
    return int(done.stdout.split()[-1])

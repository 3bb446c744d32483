"""Ranks as actors of a Ray cluster, which says where there is room for them.

Ray places them, starts them and takes them away; plans and tensors do not pass through it. Each
actor comes to rank 0 as a rank of any other host does. It does not know what ranks compute.
"""

from __future__ import annotations

import os
import secrets
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from engine_service.config import EngineConfig
from engine_service.ranks.far import Post, follow_rank_0
from engine_service.ranks.gathering import Gathering
from engine_service.ranks.hosts import SeveralHosts
from engine_service.ranks.likeness import likeness
from engine_service.worker.checkpoint import Report
from tidemill.runtime.errors import FailedPrecondition, InvalidRequest, Unavailable, Unsupported

_ROOM_S = 120.0
"""For what runs in the cluster to make room."""
_STARTED_S = 300.0
_LOOK_S = 0.5


class RankActor:
    """Holds one rank's share of the cluster."""

    def gpu_ids(self) -> list[str]:
        """GPUs of its host that are its own."""
        return [str(one) for one in load_ray().get_gpu_ids()]

    def follow(self, leader: tuple[str, int], secret: str, rank: int, log_level: str) -> int:
        """Runs the rank until rank 0 ends; returns the exit status."""
        post = Post(
            leader=leader,
            secret=secret,
            rank=rank,
            local_rank=0,  # Ray shows an actor its own GPU alone
            local_size=1,
            likeness=likeness(None),
            patience_s=_STARTED_S,
            log_level=log_level,
        )
        return follow_rank_0(post)


class RayHosts(SeveralHosts):
    """Rank 0 in this process, on this host; an actor for each other rank, as close as there is room
    for it.

    The cluster is RAY_ADDRESS's, or one that this process starts and that ends with it.
    """

    def __init__(self, config: EngineConfig, num_ranks: int, *, ends_silent_leader: bool) -> None:
        super().__init__(
            config,
            num_ranks,
            address="",
            own_ranks=range(1),
            local_size=1,
            ends_silent_leader=ends_silent_leader,
        )
        if config.device not in ("auto", "cpu", "cuda"):
            raise InvalidRequest(
                f"device {config.device!r} names a GPU, but Ray chooses them: pass cuda, cpu, auto",
                param="device",
            )
        on_cuda = config.device == "cuda"
        on_cuda |= config.device == "auto" and torch.cuda.is_available()
        self._unit = "GPU" if on_cuda else "CPU"
        self._is_ours = self._has_all = False
        self._room: Any = None
        self._actors: list[Any] = []

    def gather(self, report: Report) -> None:
        """Raises FailedPrecondition without Ray, InvalidRequest when the cluster is too small and
        Unavailable when there is no room in it."""
        ray = load_ray()
        report("ray: connecting", 0, 0)
        try:
            self._connect(ray)
            self.check()
            self._find_room(ray)
            self._start_actors(ray, report)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Takes the actors away, and the cluster if it is ours."""
        super().close()
        if self._room is not None:
            load_ray().util.remove_placement_group(self._room)
            self._room = None
        if self._is_ours:
            self._is_ours = False
            load_ray().shutdown()

    def _connect(self, ray: Any) -> None:
        if os.environ.get("RAY_ADDRESS", "").startswith("ray://"):
            raise Unsupported(
                f"RAY_ADDRESS {os.environ['RAY_ADDRESS']} is of Ray's client, and rank 0 must run "
                "on a host of the cluster: pass HOST:PORT, or auto",
                param="executor",
            )
        if not ray.is_initialized():
            self._is_ours = True
            with _own_signals():
                try:
                    ray.init(log_to_driver=False, include_dashboard=False, configure_logging=False)
                except (ConnectionError, RuntimeError, ValueError) as failure:
                    raise Unavailable(f"Ray does not start or answer: {failure}") from failure
        self._address = ray.util.get_node_ip_address()

    def _find_room(self, ray: Any) -> None:
        unit, wanted = self._unit, self._num_ranks
        there = int(ray.cluster_resources().get(unit, 0))
        if there < wanted:
            raise InvalidRequest(
                f"{wanted} ranks need a {unit} each, and the Ray cluster has {there}; pass "
                "fewer ranks (--tensor-parallel-size), or add hosts to the cluster",
                param="tensor_parallel_size",
            )
        bundles: list[dict[str, float]] = [{unit: 1} for _ in range(wanted)]
        bundles[0][f"node:{self._address}"] = 0.001  # rank 0 is here
        self._room = ray.util.placement_group(bundles, strategy="PACK")
        if not self._room.wait(_ROOM_S):
            raise Unavailable(
                f"no room for {wanted} ranks of a {unit} each in the Ray cluster within "
                f"{_ROOM_S:.0f} s, the first of them on this host ({self._address}): ray status "
                "says who has it"
            )

    def _start_actors(self, ray: Any, report: Report) -> None:
        secret = secrets.token_bytes(32)
        if self._unit == "GPU":
            own = _own_gpu(ray, self._actor(ray, 0))
            self._first_device = device_of(own, os.environ.get("CUDA_VISIBLE_DEVICES"))
        door = Gathering(self._address, 0, secret, likeness(None))
        try:
            post = ((self._address, door.port), secret.hex())
            ranks = range(1, self._num_ranks)
            level = self._config.log_level
            runs = [self._actor(ray, rank).follow.remote(*post, rank, level) for rank in ranks]
            watch = threading.Thread(target=self._watch, args=(ray, runs, door), daemon=True)
            watch.start()
            try:
                self.take(door.wait_for(ranks, self._num_ranks, report, _STARTED_S))
            finally:
                self._has_all = True
                watch.join()
        finally:  # also where no actor could be asked for: a program goes on without the port
            door.close()

    def _actor(self, ray: Any, rank: int) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        on_gpu = self._unit == "GPU"
        place = PlacementGroupSchedulingStrategy(self._room, placement_group_bundle_index=rank)
        wants = {"num_gpus": int(on_gpu), "num_cpus": int(not on_gpu), "max_restarts": 0}
        actor = ray.remote(RankActor).options(**wants, scheduling_strategy=place).remote()
        self._actors.append(actor)  # it ends when nobody knows it
        return actor

    def _watch(self, ray: Any, runs: list[Any], door: Gathering) -> None:
        """While they are waited for: an actor that cannot even start knocks nowhere."""
        while not self._has_all:
            ended, _ = ray.wait(runs, timeout=_LOOK_S)
            for rank, run in enumerate(runs, 1):
                if run in ended:
                    door.give_up(f"the actor of rank {rank} {_end_of(ray, run)}")
                    return


def device_of(gpu_id: str, visible: str | None) -> int:
    """The number in this process of a GPU that Ray names; `visible`: CUDA_VISIBLE_DEVICES. That is
    read when CUDA is first asked for anything, so changing it now might say nothing. Raises
    FailedPrecondition for a GPU that it hides."""
    names = visible.split(",") if visible else []
    if names and gpu_id not in names:
        raise FailedPrecondition(
            f"Ray gave this process GPU {gpu_id}, which CUDA_VISIBLE_DEVICES={visible} hides from "
            "it; unset that, and let Ray choose",
            reason="DEVICE_HIDDEN",
            param="device",
        )
    return names.index(gpu_id) if names else int(gpu_id)


def load_ray() -> Any:
    """Raises FailedPrecondition saying how to install it."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ModuleNotFoundError as missing:
        raise FailedPrecondition(
            f"executor ray needs {missing.name}, not installed here: pip install 'tidemill[ray]'",
            reason="NOT_INSTALLED",
            param="executor",
        ) from missing
    return ray


def _own_gpu(ray: Any, actor: Any) -> str:
    """The GPU that rank 0's actor holds. Raises Unavailable where it does not start."""
    try:
        (own,) = ray.get(actor.gpu_ids.remote(), timeout=_STARTED_S)
    except ray.exceptions.RayError as failure:  # being late is one
        raise Unavailable(
            f"the actor that holds rank 0's GPU has not told which within {_STARTED_S:.0f} s or "
            f"failed: {_last_line(failure)}; ray status and its logs say why"
        ) from failure
    return str(own)


def _end_of(ray: Any, run: Any) -> str:
    try:
        return f"ended with status {ray.get(run)}"
    except ray.exceptions.RayError as failure:
        return f"failed: {_last_line(failure)}"


def _last_line(failure: Exception) -> str:
    lines = str(failure).strip().splitlines()
    return lines[-1] if lines else type(failure).__name__


@contextmanager
def _own_signals() -> Iterator[None]:
    """Ray would end this process by itself on SIGTERM, which its parent decides."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)

"""Groups whose ranks are started by others, as on other hosts: real processes and real TCP.

The ranks compute nothing (`idle_follower`).
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engine_service.config import EngineConfig
from engine_service.node import FAR_MODULE, _start
from engine_service.nodes import node_of, read_token
from engine_service.ranks.choice import NodeHosts
from engine_service.ranks.far import Post
from engine_service.ranks.likeness import likeness
from engine_service.ranks.watcher import Watcher
from tests.waiting import free_port
from tidemill.runtime.errors import ServiceError

FOLLOWER = "tests.service.idle_follower"
TOKEN = "0123456789abcdef"


def config_of(folder: Path, count: int, port: int, **values: Any) -> EngineConfig:
    """Of a group of rank 0 and `count` nodes with a rank each."""
    token = folder / "token"
    token.write_text(TOKEN)
    chosen: dict[str, Any] = {
        "device": "cpu",
        "tensor_parallel_size": count + 1,
        "nnodes": count + 1,
        "leader_address": f"127.0.0.1:{port}",
        "group_token_file": str(token),
        "log_level": "warning",
    }
    return EngineConfig(**{**chosen, **values})


def start_far(config: EngineConfig, rank: int, **others: Any) -> subprocess.Popen[bytes]:
    """The process that stands for rank 0 beside a rank of another host. `others`: of its Post."""
    node = node_of(config, {})
    assert node is not None
    values: dict[str, Any] = {
        "leader": node.leader,
        "secret": read_token(config).hex(),
        "rank": rank,
        "local_rank": 0,
        "local_size": 1,
        "likeness": likeness(config),
        "patience_s": 60.0,
        "log_level": config.log_level,
        "module": FOLLOWER,
    }
    return _start(FAR_MODULE, Post(**{**values, **others}))


def gathered(config: EngineConfig, *, kills: bool = False) -> NodeHosts:
    """Rank 0's side of it, when all have come."""
    node = node_of(config, {})
    assert node is not None
    hosts = NodeHosts(config, node, ends_silent_leader=kills)
    hosts.gather(lambda *progress: None)
    return hosts


@contextmanager
def distant(
    folder: Path, *behaviours: str, kills: bool = False
) -> Iterator[tuple[Watcher, list[ServiceError], list[subprocess.Popen[bytes]]]]:
    """A watcher of ranks that behave so, what it says of their loss, and the fars."""
    count = len(behaviours)
    config = config_of(folder, count, free_port())
    fars = [start_far(config, rank) for rank in range(1, count + 1)]
    lost: list[ServiceError] = []
    try:
        hosts = gathered(config, kills=kills)
        watcher = Watcher(count, on_lost=lost.append, start=hosts.start)
        watcher.open()
        try:
            for rank, behaviour in enumerate(behaviours, 1):
                watcher.tell(rank, (rank, count, kills, behaviour))
            yield watcher, lost, fars
        finally:
            watcher.close()
            hosts.close()
            _await_ends(fars)
    finally:
        for one in fars:
            one.kill()
            one.wait()


def _await_ends(fars: list[subprocess.Popen[bytes]]) -> None:
    for one in fars:
        with contextlib.suppress(subprocess.TimeoutExpired):
            one.wait(5.0)


def said_of(path: Path) -> bytes:
    """By /proc; nothing of a process or thread that has ended since it was listed."""
    try:
        return path.read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def follower_of(far_pid: int) -> int:
    tasks = Path(f"/proc/{far_pid}/task").glob("*/children")
    (found,) = {int(child) for task in tasks for child in said_of(task).split()}
    return found

"""Where the ranks of a group are, and how rank 0 gets them: the interface behind `group`.

It does not know what ranks compute, nor when a group has ended.
"""

from __future__ import annotations

import json
import os
import socket
from typing import Protocol

from engine_service.child import pipe_of
from engine_service.config import EngineConfig
from engine_service.limits import MOST_RANKS
from engine_service.place import Place
from engine_service.ranks.broadcast import Wires
from engine_service.ranks.gathering import Arrival, listen
from engine_service.ranks.near import Told
from engine_service.ranks.processes import FollowerProcess
from engine_service.worker.checkpoint import Report
from engine_service.worker.device import check_devices, count_free

NEAR_MODULE = "engine_service.ranks.near"


class Hosts(Protocol):
    """gather, place, start (once for every rank but the first), close."""

    num_nodes: int
    """That hold equally many ranks each."""

    def most_ranks(self) -> int:
        """That there is room for, as far as is known before all have come. Raises InvalidRequest
        for a device that is not there."""

    def gather(self, report: Report) -> None:
        """Returns when all ranks can be started; raises why they cannot."""

    def listen(self) -> socket.socket:
        """On a free port, where all ranks reach this host."""

    def place(self, rank: int, port: int) -> Place:
        """`port`: of rank 0's store."""

    def start(self, rank: int, wires: Wires, module: str) -> FollowerProcess:
        """Where it is. Called in the thread that lives as long as the rank should; `module` runs
        on this host only."""

    def close(self) -> None:
        """Behind the end of all ranks."""


class ThisHost:
    """All ranks are processes of this machine."""

    num_nodes = 1

    def __init__(self, config: EngineConfig, num_ranks: int) -> None:
        self._device, self._num_ranks = config.device, num_ranks

    def most_ranks(self) -> int:
        free = count_free(self._device)
        return MOST_RANKS if free is None else min(free, MOST_RANKS)

    def gather(self, report: Report) -> None:
        """Raises InvalidRequest when there are fewer GPUs than ranks."""
        check_devices(self._device, self._num_ranks)

    def listen(self) -> socket.socket:
        return listen("127.0.0.1", 0)

    def place(self, rank: int, port: int) -> Place:
        return Place(rank, self._num_ranks, ("127.0.0.1", port), rank)

    def start(self, rank: int, wires: Wires, module: str) -> FollowerProcess:
        return FollowerProcess(rank, wires, module)

    def close(self) -> None:
        """Ranks leave nothing here."""


class SeveralHosts:
    """Some ranks, the first among them, are processes of this machine; the others have arrived."""

    num_nodes = 1

    def __init__(
        self,
        config: EngineConfig,
        num_ranks: int,
        *,
        address: str,
        own_ranks: range,
        local_size: int,
        ends_silent_leader: bool,
    ) -> None:
        """`address`: of this host, as the others know it; `own_ranks` are started from here;
        `local_size`: ranks on this host, whoever starts them."""
        self._config, self._num_ranks = config, num_ranks
        self._address, self._own_ranks = address, own_ranks
        self._local_size = local_size
        self._ends_silent_leader = ends_silent_leader
        self._arrived: dict[int, Arrival] = {}
        self._first_device = 0

    def most_ranks(self) -> int:
        return MOST_RANKS

    def check(self) -> None:
        """Raises InvalidRequest when there are fewer GPUs here than ranks."""
        check_devices(self._config.device, len(self._own_ranks), self._num_ranks)

    def take(self, arrived: dict[int, Arrival]) -> None:
        """All ranks of other hosts."""
        self._arrived = arrived

    def listen(self) -> socket.socket:
        return listen(self._address, 0)

    def place(self, rank: int, port: int) -> Place:
        meet_at = (self._address, port)
        local_rank, local_size = self._first_device + rank, self._local_size
        if (found := self._arrived.get(rank)) is not None:
            local_rank, local_size = found.local_rank, found.local_size
        return Place(rank, self._num_ranks, meet_at, local_rank, local_size)

    def start(self, rank: int, wires: Wires, module: str) -> FollowerProcess:
        if rank in self._own_ranks:
            return FollowerProcess(rank, wires, module)
        link, host = self._arrived[rank].link, self._arrived[rank].host
        told = Told(link.hand_over().decode(), rank, self._num_ranks, self._ends_silent_leader)
        state = pipe_of(json.dumps(told._asdict()).encode())
        try:
            more = [link.fileno(), state]
            return FollowerProcess(rank, wires, NEAR_MODULE, more=more, host=host)
        finally:
            os.close(state)
            link.close()

    def close(self) -> None:
        """Ranks that have come and were not started, because something failed before, hear of it;
        who started the others takes them away."""
        for arrival in self._arrived.values():
            arrival.link.close()

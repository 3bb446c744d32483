"""Which kind of hosts a group has."""

from __future__ import annotations

import os

from engine_service.config import EngineConfig
from engine_service.nodes import Node, read_token, serving_node
from engine_service.ranks.gathering import Gathering
from engine_service.ranks.hosts import Hosts, SeveralHosts, ThisHost
from engine_service.ranks.likeness import likeness
from engine_service.ranks.on_ray import RayHosts
from engine_service.worker.checkpoint import Report


class NodeHosts(SeveralHosts):
    """Hosts on each of which somebody has started the engine."""

    def __init__(self, config: EngineConfig, node: Node, *, ends_silent_leader: bool) -> None:
        super().__init__(
            config,
            node.num_ranks,
            address=node.leader[0],
            own_ranks=node.ranks,
            local_size=node.local_size,
            ends_silent_leader=ends_silent_leader,
        )
        self._node, self._secret = node, read_token(config)
        # Of torchrun a node is one process: there are as many as ranks, whatever their number.
        self.num_nodes = 1 if config.executor == "torchrun" else node.count

    def gather(self, report: Report) -> None:
        self.check()
        node = self._node
        door = Gathering(*node.leader, self._secret, likeness(self._config))
        others = [rank for rank in range(node.num_ranks) if rank not in node.ranks]
        self.take(door.wait_for(others, node.num_ranks, report))


def hosts_of(config: EngineConfig, num_ranks: int, *, ends_silent_leader: bool) -> Hosts:
    """Raises InvalidRequest for a config that contradicts itself or its surroundings."""
    if config.executor == "ray":
        return RayHosts(config, num_ranks, ends_silent_leader=ends_silent_leader)
    node = serving_node(config, os.environ)
    if node is None:
        return ThisHost(config, num_ranks)
    return NodeHosts(config, node, ends_silent_leader=ends_silent_leader)

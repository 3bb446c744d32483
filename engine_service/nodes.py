"""Which ranks this start of the engine runs, of a group over several hosts: from flags, or from
what a launcher has set. Pure but for the token's file. It does not know how ranks are run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd
from pathlib import Path

from engine_service.config import EngineConfig
from engine_service.limits import MOST_RANKS
from tidemill.runtime.errors import FailedPrecondition, InvalidRequest

LEADER_PORT = 50065
"""Where rank 0 waits for the other hosts, unless --leader-address says otherwise."""
_LAST_PORT = (1 << 16) - 1
_LEAST_TOKEN, _MOST_TOKEN = 16, 4096
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
_LWS = ("LWS_LEADER_ADDRESS", "LWS_GROUP_SIZE", "LWS_WORKER_INDEX")
_BY_HAND = ("nnodes", "node_rank")
_OF_SEVERAL = ("leader_address", "group_token_file")


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One of several starts that make a group: the first has rank 0 and serves."""

    index: int
    count: int
    leader: tuple[str, int]
    ranks: range
    num_ranks: int
    """Of the whole group."""
    local_rank: int = 0
    """The first rank's number on its host."""
    local_size: int
    """Ranks of the group on this host."""


def node_of(config: EngineConfig, environ: Mapping[str, str]) -> Node | None:
    """None: all ranks are started from here. Raises InvalidRequest for what contradicts itself."""
    if config.executor in ("torchrun", "lws"):
        _refuse_by_hand(config)
        return (
            _torchrun(config, environ) if config.executor == "torchrun" else _lws(config, environ)
        )
    if config.executor != "model":
        _refuse_by_hand(config)
        _refuse_several(config, f"of executor {config.executor}: leave it out")
        return None
    count, index = config.nnodes, config.node_rank
    if not 1 <= count <= MOST_RANKS:
        limit = f"a group has at most {MOST_RANKS} ranks, of which every node has one at least"
        raise InvalidRequest(f"nnodes is {count}; pass 1 to {MOST_RANKS}: {limit}", param="nnodes")
    if not 0 <= index < count:
        fitting = f"0 to {count - 1}" if count > 1 else "0, or the number of hosts with --nnodes"
        raise InvalidRequest(
            f"node_rank {index} is not one of nnodes {count}: pass {fitting}", param="node_rank"
        )
    if count == 1:
        _refuse_several(config, "of one node; pass --nnodes too, or leave it out")
        return None
    if config.leader_address is None:
        raise InvalidRequest(
            f"nnodes {count} needs --leader-address HOST[:PORT] of node 0, the same on all nodes",
            param="leader_address",
        )
    return _even(config, index, count, config.leader_address)


def check_nodes(config: EngineConfig) -> None:
    """What of it the config says by itself, wherever it is read. Raises InvalidRequest."""
    if config.executor not in ("torchrun", "lws"):
        node_of(config, {})
        return
    _refuse_by_hand(config)
    if config.leader_address is not None:
        _address(config.leader_address)


def serving_node(config: EngineConfig, environ: Mapping[str, str]) -> Node | None:
    """The same for who serves; raises InvalidRequest where that is another node."""
    node = node_of(config, environ)
    if node is not None and node.index:
        raise InvalidRequest(
            f"node {node.index} of {node.count} follows node 0 and serves nobody: start it with "
            "tidemill engine",
            param="node_rank",
        )
    return node


def read_token(config: EngineConfig) -> bytes:
    """The secret of the group. Raises FailedPrecondition saying how to make one."""
    make = "make one with: head -c 32 /dev/urandom | base64 > FILE, the same on all hosts"
    path = config.group_token_file
    if path is None:
        raise FailedPrecondition(
            f"ranks on other hosts need --group-token-file FILE, or anybody could join; {make}",
            reason="GROUP_TOKEN",
            param="group_token_file",
        )
    try:
        with Path(path).open("rb") as file:
            token = file.read(_MOST_TOKEN + 1)
    except OSError as failure:
        raise FailedPrecondition(
            f"cannot read --group-token-file {path}: {failure.strerror}; {make}",
            reason="GROUP_TOKEN",
            param="group_token_file",
        ) from failure
    if len(token) > _MOST_TOKEN:
        raise FailedPrecondition(
            f"--group-token-file {path} has more than {_MOST_TOKEN} characters, the most for a "
            f"secret; {make}",
            reason="GROUP_TOKEN",
            param="group_token_file",
        )
    if len(token := token.strip()) < _LEAST_TOKEN:
        raise FailedPrecondition(
            f"--group-token-file {path} has {len(token)} characters, {_LEAST_TOKEN} are the least; "
            f"{make}",
            reason="GROUP_TOKEN",
            param="group_token_file",
        )
    return token


def _even(config: EngineConfig, index: int, count: int, leader: str) -> Node:
    """Nodes of equally many ranks."""
    num_ranks = config.num_ranks
    if num_ranks < count:
        multiple = count // gcd(count, config.pipeline_parallel_size)
        raise InvalidRequest(
            f"{count} nodes need {count} ranks or more, and tensor_parallel_size x "
            f"pipeline_parallel_size is {num_ranks}: pass a --tensor-parallel-size that is a "
            f"multiple of {multiple}, the same on all nodes",
            param="tensor_parallel_size",
        )
    if num_ranks % count:
        fitting = [str(n) for n in range(2, num_ranks + 1) if num_ranks % n == 0]
        raise InvalidRequest(
            f"{num_ranks} ranks do not go evenly over {count} nodes; "
            f"take {' or '.join(fitting)} nodes, or a multiple of {count} ranks",
            param="tensor_parallel_size",
        )
    share = num_ranks // count
    return Node(
        index=index,
        count=count,
        leader=_address(leader),
        ranks=range(index * share, (index + 1) * share),
        num_ranks=num_ranks,
        local_size=share,
    )


def _torchrun(config: EngineConfig, environ: Mapping[str, str]) -> Node | None:
    """One start for every rank."""
    found = _read(environ, _TORCHRUN, "torchrun")
    rank, world = _index(found, "RANK", "WORLD_SIZE")
    local_rank, local_size = _index(found, "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    if world != config.num_ranks:
        size, rest = divmod(world, max(1, config.pipeline_parallel_size))
        fitting = f"{world} --pipeline-parallel-size 1" if rest else f"{size}"
        raise InvalidRequest(
            f"torchrun starts {world} processes (WORLD_SIZE) and the engine has "
            f"{config.num_ranks} ranks; pass --tensor-parallel-size {fitting}, or others of "
            "torchrun's --nnodes and --nproc-per-node",
            param="tensor_parallel_size",
        )
    if world == 1:
        return None
    return Node(
        index=rank,
        count=world,
        leader=_address(config.leader_address or found["MASTER_ADDR"]),
        ranks=range(rank, rank + 1),
        num_ranks=world,
        local_rank=local_rank,
        local_size=local_size,
    )


def _lws(config: EngineConfig, environ: Mapping[str, str]) -> Node | None:
    """One start for every pod."""
    found = _read(environ, _LWS, "a LeaderWorkerSet")
    index, count = _index(found, "LWS_WORKER_INDEX", "LWS_GROUP_SIZE")
    if count == 1:
        return None
    return _even(config, index, count, config.leader_address or found["LWS_LEADER_ADDRESS"])


def _read(environ: Mapping[str, str], names: tuple[str, ...], who: str) -> dict[str, str]:
    missing = [name for name in names if name not in environ]
    if missing:
        raise InvalidRequest(
            f"the executor takes its place from the environment, and {', '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not set: start it by {who}, or pass "
            "--executor model with --nnodes, --node-rank and --leader-address",
            param="executor",
        )
    return {name: environ[name] for name in names}


def _index(found: Mapping[str, str], name: str, count_name: str) -> tuple[int, int]:
    """(index, count); of one it does not matter which it is."""
    index, count = _number(found, name), _number(found, count_name)
    if index >= count != 1:
        raise InvalidRequest(
            f"{name} is {index} and {count_name} {count}; who starts it sets the first to 0 and up "
            "to one less than the second",
            param="executor",
        )
    return index, count


def _number(found: Mapping[str, str], name: str) -> int:
    if not found[name].isdecimal():
        raise InvalidRequest(f"{name} is {found[name]!r}, not a number", param="executor")
    return int(found[name])


def _refuse_by_hand(config: EngineConfig) -> None:
    usual = EngineConfig()
    given = [name for name in _BY_HAND if getattr(config, name) != getattr(usual, name)]
    if given:
        raise InvalidRequest(
            f"{' and '.join(given)} say where a node of executor model is, and executor "
            f"{config.executor} knows that itself: pass one or the other",
            param=given[0],
        )


def _refuse_several(config: EngineConfig, whom: str) -> None:
    """What only hosts that come to each other read."""
    for name in _OF_SEVERAL:
        if (value := getattr(config, name)) is not None:
            raise InvalidRequest(f"{name} {value!r} says nothing {whom}", param=name)


def _address(text: str) -> tuple[str, int]:
    """HOST, HOST:PORT or [IPV6]:PORT."""
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        port = rest.removeprefix(":")
    elif text.count(":") > 1:
        host, port = text, ""
    else:
        host, _, port = text.partition(":")
    if not host or (port and not (port.isdecimal() and 0 < int(port) <= _LAST_PORT)):
        raise InvalidRequest(
            f"leader_address {text!r} is not HOST or HOST:PORT with a port from 1 to "
            f"{_LAST_PORT}; an IPv6 address with a port is [ADDRESS]:PORT",
            param="leader_address",
        )
    return host, int(port or LEADER_PORT)

"""Ranks that hold one model together, and what they say to each other about tensors.

Collectives run in launch order on the current stream (NCCL on CUDA, where they are captured with
the step; gloo on the CPU), so all ranks must launch the same steps in the same order. All ranks get
the same bits. It does not know models, plans or how processes come to be.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.distributed import Store as Store  # type: ignore[attr-defined]
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from engine_service import first_rank
from engine_service.beside import Summed
from engine_service.device_kinds import check_kinds, kind_of
from engine_service.peers import PeerSums
from engine_service.place import Place
from engine_service.pushes import MakeRows
from engine_service.stages import WHOLE, Links, Stage

# torch 2.13 renames it and warns of the old name; older ones know no other.
_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_MEET_S = 300.0
"""How long ranks wait for each other to come."""
_WAIT_S = 1800.0
"""How long one waits for another in a collective: the first of them waits as long as the slowest
takes to load, whose files may be on a disk where others have theirs in memory. Who is lost is told
by the watcher, or by the end of its connections."""
_KIND = "tidemill/kind/{}"
"""Under which a rank says on what it computes."""
_HERE, _ANYWHERE = "127.0.0.1", ("0.0.0.0", "::")
_LOG = logging.getLogger("tidemill.rank")
_ON_DEVICES: WeakSet[Any] = WeakSet()
"""The library's groups whose ranks wait for each other on their devices."""


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """The ranks that share every layer (tensor parallelism) of a stage; one rank is its own group.
    `rank` counts within the group."""

    rank: int = 0
    size: int = 1
    stage: Stage = WHOLE
    """Which layers those are (pipeline parallelism)."""
    _devices: Any = field(default=None, repr=False)
    _hosts: Any = field(default=None, repr=False)
    peers: PeerSums | None = field(default=None, repr=False)
    """Where the ranks read and write each other's memory; None: everything is the library's."""
    whole_experts: bool = False
    """Whether each rank holds some of a layer's experts whole, instead of a share of each."""
    is_one_host: bool = True

    @property
    def num_all(self) -> int:
        """Ranks of all stages."""
        return self.size * self.stage.count

    def add_sum(
        self,
        residual: torch.Tensor,
        site: int,
        make: MakeRows,
        *,
        norm: tuple[torch.Tensor, float] | None = None,
        inputs: int = 0,
        in_pieces: bool = False,
    ) -> Summed:
        """residual := residual + the sum of what `make` gives on all ranks, and the RMSNorm
        (weight, eps) of that, if one is given and the sum has it for nothing. `inputs`: of the
        product by which `make` can also make some rows after others; 0: it cannot. `in_pieces`:
        what reads the sum may take its rows as they come.

        Sums that follow each other have different sites (below peers.NUM_SITES).
        """
        if self.peers is not None and self.peers.fit(residual):
            return self.peers.add_sum(
                site, residual, make, norm, inputs=inputs, in_pieces=in_pieces
            )
        residual.add_(self.sum_(make(slice(None), None)))
        return Summed()

    def sum_(self, x: torch.Tensor) -> torch.Tensor:
        """x := the sum over all ranks."""
        if self.size == 1:
            return x
        if first_rank.suits(x):
            self._give_all(x, x, lambda parts: sum(parts[1:], start=parts[0]))
        else:
            dist.all_reduce(x, group=self._devices)
        return x

    def join(self, x_NV: torch.Tensor) -> torch.Tensor:
        """[N, V] of every rank to [N, size * V], in the order of ranks."""
        if self.size == 1:
            return x_NV
        num_rows, width = x_NV.shape
        if first_rank.suits(x_NV):
            joined = x_NV.new_empty(num_rows, self.size * width)
            self._give_all(joined, x_NV.contiguous(), lambda parts: torch.cat(parts, dim=1))
            return joined
        pieces = x_NV.new_empty(self.size * num_rows, width)
        _gather(pieces, x_NV.contiguous(), group=self._devices)
        columns = pieces.view(self.size, num_rows, width).transpose(0, 1)
        return columns.reshape(num_rows, self.size * width).contiguous()

    def _give_all(self, out: torch.Tensor, x: torch.Tensor, make: first_rank.MakeOfParts) -> None:
        sizes = {"rank": self.rank, "size": self.size}
        first_rank.give_all(out, x, make, **sizes, group=self._devices)

    def all_of(self, fact: Any) -> list[Any]:
        """What every rank of every stage says, in the order of ranks; small host objects.
        Blocks."""
        if self.num_all == 1:
            return [fact]
        facts: list[Any] = [None] * self.num_all
        dist.all_gather_object(facts, fact, group=self._hosts)
        return facts

    def await_all(self, within_s: float) -> None:
        """Returns when every rank of every stage has called it; raises RuntimeError where one has
        not in time."""
        if self.num_all > 1:
            # A monitored barrier would be in time on rank 0 only.
            work = dist.all_reduce(torch.zeros(1), group=self._hosts, async_op=True)
            assert work is not None, "not of this group"
            work.wait(timedelta(seconds=within_s))

    def with_peers(self, rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Group:
        """The same with sums over peer memory for up to [rows, width], where there is such. All
        ranks must call it."""
        if self.size == 1 or device.type != "cuda":
            return self
        # Hosts may have different numbers of ranks: all ask, or some would wait for the others.
        if False in self.all_of(self.is_one_host):
            return self
        sizes: dict[str, Any] = {"rows": rows, "width": width, "dtype": dtype, "device": device}
        sizes["group"] = self._devices
        peers, fault = None, None
        try:
            peers = PeerSums(self.rank, self.size, **sizes)
        except RuntimeError as error:
            fault = str(error)
        # All or none: a kernel that waits for a peer which asks NCCL waits for ever. Until here
        # nobody has told anything either, so this is also where memory is known to be cleared.
        faults = [told for told in self.all_of(fault) if told is not None]
        if not faults:
            return replace(self, peers=peers)
        _LOG.warning("no sums over peer memory, NCCL's instead: %s", faults[0])
        return self


ALONE = Group()


def meet(
    place: Place, device: torch.device, store: Store | None = None, *, num_stages: int = 1
) -> Group:
    """Waits for the other ranks; every rank of the place's store must call it.

    `store` is rank 0's own, which listens at `place.meet_at` already. The first ranks are those of
    the first of `num_stages` stages, which divide the number of ranks. Raises FailedPrecondition
    where their devices are of kinds that cannot share a model.
    """
    if place.size == 1:
        return ALONE
    # NVLink multicast can hang the GPUs of some hosts, and nothing here needs it.
    os.environ |= {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    if place.meet_at[0] == _HERE and sys.platform == "linux":
        # Else gloo listens where the machine's name leads to, maybe for the whole network.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if store is None:
        patience = timedelta(seconds=_MEET_S)
        store = TCPStore(*place.meet_at, timeout=patience, wait_for_workers=False)
    # Before the library is asked: where one rank has no GPU, its collectives would be others.
    check_kinds(_kinds_of_all(place, device, store), num_stages)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend,
        store=store,
        rank=place.rank,
        world_size=place.size,
        timeout=timedelta(seconds=_WAIT_S),
    )
    hosts = dist.new_group(backend="gloo") if device.type == "cuda" else None
    _ON_DEVICES.add(dist.group.WORLD)
    size = place.size // num_stages
    # Ranks of one host follow each other, and so do those of one stage.
    told: dict[str, Any] = {"_hosts": hosts, "is_one_host": place.num_here % size == 0}
    if num_stages == 1:
        return Group(place.rank, size, **told)
    stages = [range(first, first + size) for first in range(0, place.size, size)]
    assert len(stages) == num_stages, f"{num_stages} stages of {place.size} ranks"
    # All ranks make all groups, in the same order.
    groups = [dist.new_group(list(ranks)) if size > 1 else None for ranks in stages]
    links = Links(place.rank, place.size, num_stages=num_stages, device=device)
    index, rank = divmod(place.rank, size)
    _ON_DEVICES.update(group for group in (groups[index], links.back) if group is not None)
    links.greet()
    return Group(rank, size, Stage(index, num_stages, links), groups[index], **told)


def abort_all(*, waits: bool) -> None:
    """No device waits for a rank in what the library has launched any more; nothing may be launched
    afterwards. From any thread. `waits`: returns when nothing is left of the groups, which NCCL
    denies while there are graphs with its kernels."""
    # At once: the end of one may wait for the device, and that for what another one has launched.
    ends = [threading.Thread(target=group.abort, daemon=True) for group in _ON_DEVICES]
    for one in ends:
        one.start()
    for one in ends if waits else ():
        one.join()


def _kinds_of_all(place: Place, device: torch.device, store: Store) -> list[str]:
    """In the order of ranks; waits for them."""
    store.set(_KIND.format(place.rank), kind_of(device))
    return [store.get(_KIND.format(rank)).decode() for rank in range(place.size)]


def open_store(listener: socket.socket) -> tuple[TCPStore, TCPStore, int]:
    """Where the ranks meet: a store of rank 0 on a socket that listens, rank 0's own way to it, and
    its port. Who waits there for a rank raises as soon as nobody holds the first any more.

    By itself a store would listen on all interfaces, and it asks nobody who he is.
    """
    with listener:
        address, port = listener.getsockname()[:2]
        # The store's own client comes to it too: where it listens, and that may be one address.
        host = _HERE if address in _ANYWHERE else address
        server = TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
    return server, TCPStore(host, port, wait_for_workers=False), port

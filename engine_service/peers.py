"""Memory that the ranks of one machine read of each other, for sums of small tensors.

It does not know models; `distributed.Group` asks it before it asks NCCL.
"""

from __future__ import annotations

from weakref import WeakSet

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric

from engine_service.kernels.jit import runs_triton
from engine_service.kernels.peer_sum import MAX_BLOCKS, Parts, add_parts_triton, release

NUM_SITES = 2
"""Places that parts are written to in turn: a place is free again when the next sum has begun."""
_MOST_BYTES = {2: 64 << 20}
"""Of a part, by ranks: two read no more from each other so than in a ring."""
_FEW_BYTES = 1 << 20
"""With more ranks: above, each would read more than the parts of a ring."""
_OPEN: WeakSet[PeerSums] = WeakSet()


def release_all() -> None:
    """Nobody in this process waits for a peer any more, as if all had told that they are there: the
    end of a group that has lost one. From any thread; what is summed means nothing afterwards."""
    for sums in list(_OPEN):
        sums.release()


class PeerSums:
    """`room` to compute a part in, and `add` to sum what all ranks have put there."""

    def __init__(
        self,
        rank: int,
        size: int,
        *,
        rows: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """Parts of up to `rows` x `width`. Blocks until all ranks of the group (None: all that
        there are) are here; raises RuntimeError where their devices cannot read each other.
        Nobody may add before all of them have one."""
        most = _MOST_BYTES.get(size, _FEW_BYTES)
        self._rows = min(rows, most // (width * dtype.itemsize))
        self._width, self._dtype, self._rank = width, dtype, rank
        sharers = group or dist.group.WORLD
        assert sharers is not None, "no ranks to share memory with"

        def share(shape: tuple[int, ...], number: torch.dtype) -> tuple[torch.Tensor, ...]:
            own = symmetric.empty(*shape, dtype=number, device=device).zero_()
            handle = symmetric.rendezvous(own, sharers)
            self._keep.append((own, handle))
            return tuple(handle.get_buffer(peer, shape, number) for peer in range(size))

        self._keep: list[object] = []
        parts = share((NUM_SITES, self._rows, width), dtype)
        signals = share((size, MAX_BLOCKS), torch.int32)
        count = torch.zeros(MAX_BLOCKS, dtype=torch.int32, device=device)
        self._sites = [
            Parts(tuple(part[site] for part in parts), signals, count) for site in range(NUM_SITES)
        ]
        self._aside = torch.cuda.Stream(device)
        torch.cuda.synchronize(device)
        _OPEN.add(self)

    def room(self, site: int, residual: torch.Tensor) -> torch.Tensor | None:
        """Where this rank's part of a sum with `residual` goes; None if it does not fit, or where
        kernels have been given up."""
        if not runs_triton(residual):
            return None
        rows, width = residual.shape
        fits = 0 < rows <= self._rows and (width, residual.dtype) == (self._width, self._dtype)
        return self._sites[site].parts[self._rank][:rows] if fits else None

    def add(
        self, site: int, residual: torch.Tensor, norm: tuple[torch.Tensor, float] | None = None
    ) -> torch.Tensor | None:
        """residual := residual + the sum of all ranks' parts; returns its RMSNorm (weight, eps), if
        one is given."""
        return add_parts_triton(residual, self._sites[site], self._rank, norm)

    def release(self) -> None:
        """See `release_all`."""
        with torch.cuda.stream(self._aside):
            release(self._sites[0], self._rank)  # all sites have the same signals

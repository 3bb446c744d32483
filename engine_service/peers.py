"""Memory of each other that the ranks of one machine read and write, for sums over them.

It does not know models; `distributed.Group` asks it before it asks NCCL.
"""

from __future__ import annotations

from weakref import WeakSet

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric

from engine_service.beside import BesideSums, Summed
from engine_service.kernels import mailed_sum, peer_sum
from engine_service.kernels.jit import runs_triton
from engine_service.kernels.mailed_sum import (
    EMPTY,
    Mail,
    add_mailed_shares_triton,
    add_mailed_triton,
    words_of,
)
from engine_service.kernels.peer_sum import MAX_BLOCKS, Parts, add_parts_triton
from engine_service.kernels.rounds_sum import add_parts_rounds_triton
from engine_service.pushes import LEAST_ROWS, MakeRows, Pushes

NUM_SITES = 2
"""Places that parts are written to in turn: a place is free again when the next sum has begun, its
boxes when that is whole."""
_MOST_BYTES = 128 << 20
"""Of a part."""
_MAILED_BYTES = 16 << 20
"""Of a part that is sent into boxes; of a larger one the ranks read each other's."""
_FEW_ROWS = 16
"""Of a part that is sent whole and added in pieces, without a norm: the product that reads so few
rows has it inside (`small_linear`), and where it has not, a norm of its own costs about what whole
rows do. Of more rows three ranks or more add a share each; two would send no less so."""
LEAST_INPUTS = 4096
"""Of a product beside which three ranks or more add its chunks, if nothing else is beside them.
With 2,048 a chunk is made in half of the time that a sum takes: nothing was won, with four times as
many launches."""
_OPEN: WeakSet[PeerSums] = WeakSet()


def release_all() -> None:
    """Nobody in this process waits for a peer any more, as if all had told that they are there: the
    end of a group that has lost one. From any thread; what is summed means nothing afterwards."""
    for sums in list(_OPEN):
        sums.release()


class PeerSums:
    """Sums of tensors that `fit`; `add` is the second half of one whose part is there already."""

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
        self._rows = min(rows, _MOST_BYTES // (width * dtype.itemsize))
        self._width, self._dtype = width, dtype
        self._rank, self._size = rank, size
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
        lines = torch.tensor([line.data_ptr() for line in signals], device=device)
        count = torch.zeros(MAX_BLOCKS, dtype=torch.int32, device=device)
        self.sites = [
            Parts(tuple(part[site] for part in parts), signals, lines, count)
            for site in range(NUM_SITES)
        ]
        self._mailed_rows = min(self._rows, _MAILED_BYTES // (width * dtype.itemsize))
        boxes = share((NUM_SITES, size, self._mailed_rows, width), words_of(dtype))
        boxes[rank].fill_(EMPTY)
        released = torch.zeros(1, dtype=torch.int32, device=device)
        self.mails = [
            Mail(tuple(box[site] for box in boxes), released) for site in range(NUM_SITES)
        ]
        self._pushes = None
        if size == 2 and self._rows >= LEAST_ROWS:
            sizes = {"sites": NUM_SITES, "rows": self._rows, "width": width}
            self._pushes = Pushes(rank, share, **sizes, dtype=dtype)
        self._beside = BesideSums(rank, self.sites, device) if size > 2 else None
        self._aside = torch.cuda.Stream(device)
        torch.cuda.synchronize(device)
        _OPEN.add(self)

    def fit(self, residual: torch.Tensor) -> bool:
        """Whether there is room for parts of a sum with `residual`; not where kernels have been
        given up."""
        rows, width = residual.shape
        fits = 0 < rows <= self._rows and (width, residual.dtype) == (self._width, self._dtype)
        return fits and runs_triton(residual)

    def add_sum(
        self,
        site: int,
        residual: torch.Tensor,
        make: MakeRows,
        norm: tuple[torch.Tensor, float] | None = None,
        *,
        inputs: int = 0,
        in_pieces: bool = False,
    ) -> Summed:
        """residual := residual + the sum of what `make` gives on all ranks, and its RMSNorm
        (weight, eps), if one is given and costs nothing here. `inputs`: of the product by which
        `make` can also make some rows after others; 0: it cannot. `in_pieces`: what reads the sum
        may take its rows as they come."""
        num_rows = len(residual)
        part = self.sites[site].parts[self._rank][:num_rows]
        # Steps that are captured are small; and copies are counted on the host.
        captured = torch.cuda.is_current_stream_capturing()
        if inputs and num_rows >= LEAST_ROWS and not captured:
            if self._pushes is not None:
                return Summed(self._pushes.add(site, residual, part, make, norm))
            if self._beside is not None and (in_pieces or inputs >= LEAST_INPUTS):
                return self._beside.add(site, residual, make, norm, in_pieces=in_pieces)
        make(slice(None), part)
        return Summed(self.add(site, residual, norm))

    def add(
        self, site: int, residual: torch.Tensor, norm: tuple[torch.Tensor, float] | None = None
    ) -> torch.Tensor | None:
        """residual := residual + the sum of all ranks' parts; returns its RMSNorm (weight, eps), if
        one is given and costs nothing here."""
        shared, num_rows = self.sites[site], len(residual)
        if num_rows <= self._mailed_rows:
            mailed = shared.parts[self._rank][:num_rows], self.mails[site], self._rank
            if num_rows <= _FEW_ROWS:
                return add_mailed_triton(residual, *mailed)
            if self._size == 2:
                return add_mailed_triton(residual, *mailed, norm)
            return add_mailed_shares_triton(residual, *mailed, norm)
        if self._size == 2:
            return add_parts_triton(residual, shared, self._rank, norm)
        return add_parts_rounds_triton(residual, shared, self._rank, norm)

    def release(self) -> None:
        """See `release_all`."""
        with torch.cuda.stream(self._aside):
            # All sites have the same signals.
            peer_sum.release(self.sites[0], self._rank)
            mailed_sum.release(self.mails[0])
            if self._pushes is not None:
                self._pushes.release()

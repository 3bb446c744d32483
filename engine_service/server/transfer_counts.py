"""What is counted of KV transfers, on either side. It does not know streams."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic

from engine_service.core.handoff import InlinePiece, Piece
from tidemill.telemetry.families import LONG_SECONDS, Families

SENT, RECEIVED = "sent", "received"


@dataclass(slots=True)
class Transfer:
    """One of them; `outcome` is done, partial (the rest was computed), or failed."""

    outcome: str = "failed"
    num_tokens: int = 0
    num_bytes: int = 0

    def add(self, num_tokens: int, piece: Piece) -> None:
        """A piece of it has been moved."""
        self.num_tokens += num_tokens
        self.num_bytes += _size_of(piece)


class TransferCounts:
    """`direction` is sent or received."""

    def __init__(self, families: Families) -> None:
        counter, seconds = families.counter, families.histogram
        self._ended = counter("kv_transfers", "KV transfers.", "direction", "outcome")
        self._bytes = counter("kv_transfer_bytes", "KV moved.", "direction", "connector")
        self._seconds = seconds(
            "kv_transfer_seconds", "Whole KV transfers.", LONG_SECONDS, "direction"
        )
        self._open = families.gauge("kv_transfers_open", "KV transfers under way.", "direction")

    @contextmanager
    def transfer(self, model: str, direction: str, one: Transfer) -> Iterator[None]:
        """Around one, which is a failure until it says otherwise."""
        began = monotonic()
        self._open.labels(model, direction).inc()
        try:
            yield
        finally:
            self._open.labels(model, direction).dec()
            self._ended.labels(model, direction, one.outcome).inc()
            self._seconds.labels(model, direction).observe(monotonic() - began)

    def moved(self, model: str, direction: str, piece: Piece) -> None:
        """A piece has been sent, or is in the pages."""
        is_inline = isinstance(piece, InlinePiece)
        connector = "grpc" if is_inline else "shm"
        self._bytes.labels(model, direction, connector).inc(_size_of(piece))


def _size_of(piece: Piece) -> int:
    return len(piece.content) if isinstance(piece, InlinePiece) else piece.size

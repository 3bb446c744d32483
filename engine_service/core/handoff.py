"""What the server asks of a core to move KV pages between engines. Picklable plain values.

A transfer is a number under which the core remembers a prefix. It holds no pages: what it reads and
writes are units of the prefix index, which may be evicted between two asks like any other. Then
there is less to read, or to write behind, and whoever wants the KV computes the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class KvLayout(NamedTuple):
    """What the bytes of a page mean. Two engines with the same one can exchange pages."""

    model_id: str
    weight_version: str
    dtype: str
    page_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int


class KvSource(NamedTuple):
    """An engine that computes a prompt for another one, and who asks on whose behalf."""

    address: str
    traceparent: str = ""
    tracestate: str = ""


MAX_ON_THE_WAY = 8
WINDOW_BYTES = 16 << 20


def most_on_the_way(piece_bytes: int) -> int:
    """Pieces of a transfer that are exported and not taken yet, at most: of WINDOW_BYTES in all,
    but two of them at least."""
    return min(MAX_ON_THE_WAY, max(2, WINDOW_BYTES // max(piece_bytes, 1)))


@dataclass(frozen=True, slots=True)
class InlinePiece:
    """The bytes of some pages themselves, and their CRC-32."""

    content: bytes
    crc32: int


@dataclass(frozen=True, slots=True)
class SharedPiece:
    """Bytes in a file without a name (memfd) that process `pid` has open as `fd`. They lie there
    for as long as it has this stamp on it."""

    pid: int
    fd: int
    size: int
    stamp: int


Piece = InlinePiece | SharedPiece


class BeginTransfer(NamedTuple):
    """The answer is a Begun. `tokens` are little-endian uint32."""

    tokens: bytes
    method: str
    """Decoding method that the pages are for; empty: the default one."""
    salt: str
    is_prompt: bool
    """A whole prompt: the part of it that has to be computed for the first token is left out."""


class Begun(NamedTuple):
    transfer: int
    num_tokens: int
    """Of the whole units that can be moved."""
    num_found: int
    """Leading tokens whose KV is here already."""
    unit_bytes: int
    unit: int
    """Tokens of a unit."""
    has_room: bool = True
    """Whether those that are not here would find room. Also when all pages together were too few:
    then there is nothing to wait for."""


class HasRoom(NamedTuple):
    """The answer is `num_found` and `has_room` of a transfer's Begun, as they are now."""

    transfer: int


class ExportPages(NamedTuple):
    """The answer is an Exported: units from token `start` on, at most `most_bytes` if that is one
    at least. They are there until `most_on_the_way` more of the same transfer are exported."""

    transfer: int
    start: int
    most_bytes: int


class Exported(NamedTuple):
    num_tokens: int
    """0: what stood there is gone, or was never computed."""
    piece: SharedPiece | None


class ImportPages(NamedTuple):
    """Writes those of units [start, start + num_tokens) into the index that are not there yet. The
    answer is whether the prefix is there up to their end: not behind a gap, or without room."""

    transfer: int
    start: int
    num_tokens: int
    piece: SharedPiece


class EndTransfer(NamedTuple):
    """Forgets it; nothing where it is not known."""

    transfer: int


def end_of(begun: Begun) -> EndTransfer:
    """What forgets it again."""
    return EndTransfer(begun.transfer)


TransferAsk = BeginTransfer | HasRoom | ExportPages | ImportPages | EndTransfer

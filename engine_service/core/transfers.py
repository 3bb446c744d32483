"""KV of prefixes out of the pages of one engine and into those of another.

It works on the prefix index alone, a unit at a time, between two steps: whatever it takes for that
it gives back before it returns. So nothing is left over when one of the two engines dies, and no
request ever waits for a transfer's pages. It does not know requests, tensors or connections.
"""

from __future__ import annotations

import itertools
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from engine_service.core.checks import read_token_ids
from engine_service.core.handoff import (
    BeginTransfer,
    Begun,
    EndTransfer,
    Exported,
    ExportPages,
    HasRoom,
    ImportPages,
    SharedPiece,
    TransferAsk,
)
from engine_service.core.page_table import PageTable
from engine_service.core.pages import PageManager
from engine_service.core.strategy import DecodeStrategy
from tidemill.runtime.errors import FailedPrecondition, Unsupported

MAX_TRANSFERS = 1024
"""Those that are remembered; the oldest is forgotten. Each costs about 5 bytes a token."""


class PageStore(Protocol):
    """Where the bytes of pages are."""

    page_bytes: int

    def read(self, transfer: int, pages: list[int]) -> SharedPiece:
        """The pages' bytes, one after the other."""

    def write(self, pages: list[int], piece: SharedPiece, num_known: int) -> None:
        """What follows the piece's first `num_known` pages. Raises a ServiceError for bytes that
        are too many or too few, or others by now; pages may have been written then."""

    def end(self, transfer: int) -> None:
        """Frees what was read for it."""


@dataclass(slots=True)
class _Transfer:
    tokens: array[int]
    table: PageTable
    """Holds no pages between two asks, but the digests."""


class Transfers:
    """take. The pages that it writes nobody holds, and those that it reads are final, so that a
    step in flight and a transfer do not meet."""

    def __init__(
        self,
        pages: PageManager,
        store: PageStore,
        strategies: Mapping[str, DecodeStrategy],
        default_method: str,
        vocab_size: int,
    ) -> None:
        self._pages = pages
        self._store = store
        self._strategies = strategies
        self._default_method = default_method
        self._vocab_size = vocab_size
        self._numbers = itertools.count(1)
        self._transfers: OrderedDict[int, _Transfer] = OrderedDict()

    def take(self, ask: TransferAsk) -> Any:
        """The answer; raises a ServiceError instead."""
        match ask:
            case BeginTransfer():
                return self._begin(ask)
            case HasRoom(transfer):
                one = self._find(transfer)
                return self._look(one.table, one.tokens)
            case ExportPages():
                return self._export(ask)
            case ImportPages():
                return self._import(ask)
            case EndTransfer(transfer):
                self._end(transfer)
        return None

    def _begin(self, ask: BeginTransfer) -> Begun:
        method = ask.method or self._default_method
        strategy = self._strategies.get(method)
        if strategy is None or strategy.mask_block > self._pages.num_pages * self._pages.page_size:
            raise Unsupported(
                f"prompts of the method {method!r} have no KV of their own that could be moved; "
                "send the request without kv_source",
                param="kv_source",
            )
        tokens = read_token_ids("prompt_token_ids", ask.tokens, self._vocab_size)
        table = self._pages.open(strategy.mask_block, ask.salt)
        limit = strategy.max_cached(len(tokens)) if ask.is_prompt else len(tokens)
        limit = limit // table.unit * table.unit
        if ask.is_prompt and self._pages.pages_for(limit) > self._pages.num_pages:
            limit = 0  # it is refused: nobody's pages are evicted for it
        wanted = array("I", tokens[:limit])
        found = self._look(table, wanted)
        number = next(self._numbers)
        self._transfers[number] = _Transfer(wanted, table)
        if len(self._transfers) > MAX_TRANSFERS:
            self._end(next(iter(self._transfers)))
        unit_bytes = table.pages_per_unit * self._store.page_bytes
        return Begun(number, limit, unit_bytes=unit_bytes, unit=table.unit, **found)

    def _look(self, table: PageTable, tokens: Sequence[int]) -> dict[str, Any]:
        """`num_found` and `has_room` of a Begun."""
        pages, num_tokens = self._pages, len(tokens)
        num_found = pages.adopt(table, pages.match(table, tokens, num_tokens))
        need = pages.pages_for(num_tokens)
        has_room = need - len(table.pages) <= pages.num_free
        pages.release(table)
        return {"num_found": num_found, "has_room": has_room}

    def _export(self, ask: ExportPages) -> Exported:
        one = self._find(ask.transfer)
        table, size = one.table, one.table.unit
        units = max(1, ask.most_bytes // (table.pages_per_unit * self._store.page_bytes))
        limit = min(len(one.tokens), ask.start + units * size)
        num_held = self._pages.adopt(table, self._pages.match(table, one.tokens, limit))
        try:
            pages = table.pages[ask.start // self._pages.page_size :]
            if not pages:
                return Exported(0, None)
            return Exported(num_held - ask.start, self._store.read(ask.transfer, pages))
        finally:
            self._pages.release(table)

    def _import(self, ask: ImportPages) -> bool:
        one = self._find(ask.transfer)
        table, stop = one.table, ask.start + ask.num_tokens
        is_whole = ask.num_tokens > 0 and not (ask.start % table.unit or stop % table.unit)
        if not is_whole or stop > len(one.tokens):
            raise FailedPrecondition(
                f"tokens {ask.start} to {stop} came, of {len(one.tokens)} in units of {table.unit}",
                reason="KV_PIECE",
            )
        num_held = self._pages.adopt(table, self._pages.match(table, one.tokens, stop))
        try:
            if num_held >= stop:
                return True
            if num_held < ask.start or not self._pages.reserve(table, stop):
                return False
            size = self._pages.page_size  # others with the same beginning may have brought some
            num_known = (num_held - ask.start) // size
            self._store.write(table.pages[num_held // size :], ask.piece, num_known)
            self._pages.seal(table, one.tokens, stop)
            return True
        finally:
            self._pages.release(table)

    def _end(self, transfer: int) -> None:
        self._transfers.pop(transfer, None)
        self._store.end(transfer)

    def _find(self, transfer: int) -> _Transfer:
        one = self._transfers.get(transfer)
        if one is None:
            raise FailedPrecondition(
                f"transfer {transfer} is over, or {MAX_TRANSFERS} others have begun since",
                reason="NO_TRANSFER",
            )
        self._transfers.move_to_end(transfer)
        return one

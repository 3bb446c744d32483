"""How an engine that has answered comes in: it is of the same model, whose tokenizer is there.

One fetched tokenizer serves for all engines of a model, so it is asked of one of them; where that
one is slow, of the next too, so that it holds up nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from frontend.engine_client import EngineClient
from frontend.fleet.same_model import common_facts
from frontend.messages import EngineFacts

Known = Callable[[], Mapping[str, EngineFacts]]
"""What the other engines that are in have said, by address, at the time."""
PATIENCE_S = 2.0
"""For an engine that sends its tokenizer, before the next one is asked."""


class Models(Protocol):
    """Whoever keeps the model that is served."""

    def needs_tokenizer(self, facts: EngineFacts) -> bool:
        """Whether its files have to be fetched from the engine."""

    async def serve(self, facts: EngineFacts, folder: Path | None) -> None:
        """From now on, with the tokenizer's files in `folder` if they are needed."""


class Adoption:
    """adopt. One engine comes in at a time; what an engine is waited for is not part of that."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._turn, self._starting = asyncio.Lock(), asyncio.Lock()
        self._num_coming = 0
        """That have been asked for their tokenizers."""
        self._news = asyncio.Event()
        """One of them has come in, or has failed."""

    async def adopt(self, client: EngineClient, facts: EngineFacts, known: Known) -> None:
        """Sets the facts of an engine that is in. Raises FailedPrecondition when it is not one of
        those that are, and what fetching its tokenizer raises."""
        is_in = False
        while not is_in:
            common_facts(facts, known())
            if not self._models.needs_tokenizer(facts):
                is_in = await self._enter(client, facts, known, None)
                continue
            if not await self._begin(facts):
                continue
            try:
                with tempfile.TemporaryDirectory(prefix="tidemill-tokenizer-") as name:
                    folder = Path(name)
                    if await self._fetched(client, facts, folder):
                        is_in = await self._enter(client, facts, known, folder)
            finally:
                self._num_coming -= 1
                self._tell()

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def _begin(self, facts: EngineFacts) -> bool:
        """Whether it is to be asked for its tokenizer, now; False: it is not needed any more."""
        async with self._starting:
            deadline = asyncio.get_running_loop().time() + PATIENCE_S
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(deadline):
                    while self._num_coming and self._models.needs_tokenizer(facts):
                        await self._news.wait()
            if not self._models.needs_tokenizer(facts):
                return False
            self._num_coming += 1
            return True

    async def _enter(
        self, client: EngineClient, facts: EngineFacts, known: Known, folder: Path | None
    ) -> bool:
        """False: the model has changed while others came in, and now its files are needed."""
        async with self._turn:
            common = common_facts(facts, known())  # others have come in since it was fetched
            if folder is None and self._models.needs_tokenizer(facts):
                return False
            await self._models.serve(common, folder)
            client.facts = facts
            self._tell()
        return True

    async def _fetched(self, client: EngineClient, facts: EngineFacts, folder: Path) -> bool:
        """False: another engine was first, and the files are not needed any more."""
        fetching = asyncio.ensure_future(client.fetch_tokenizer(folder))
        waiting: set[asyncio.Future[Any]] = {fetching}
        try:
            while not fetching.done() and self._models.needs_tokenizer(facts):
                news = asyncio.ensure_future(self._news.wait())
                waiting = {fetching, news}
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                news.cancel()
            if not self._models.needs_tokenizer(facts):
                return False
            await fetching
            return True
        finally:
            for one in waiting:
                one.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

"""Engines that come in while the model that is served becomes another one."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from frontend.fleet.adoption import Adoption
from frontend.messages import EngineFacts
from tests.unit.test_gap import FACTS
from tests.waiting import until


class Desk:
    """Serves one model at a time, which takes as long as a test likes."""

    def __init__(self) -> None:
        self.digest = "old"
        self.may_serve = asyncio.Event()
        self.served: list[tuple[str, bool]] = []

    def needs_tokenizer(self, facts: EngineFacts) -> bool:
        return facts.tokenizer_sha256 != self.digest

    async def serve(self, facts: EngineFacts, folder: Path | None) -> None:
        await self.may_serve.wait()
        self.digest = facts.tokenizer_sha256
        self.served.append((self.digest, folder is not None))


def engine(name: str, digest: str) -> tuple[Any, EngineFacts]:
    fetched: list[Path] = []

    async def fetch_tokenizer(folder: Path) -> None:
        fetched.append(folder)

    client = SimpleNamespace(fetch_tokenizer=fetch_tokenizer, facts=None, fetched=fetched)
    return client, replace(FACTS, instance_id=name, tokenizer_sha256=digest)


async def test_who_found_its_model_served_fetches_when_it_is_not_any_more() -> None:
    """It waited for its turn while an engine of another model came in, which was lost at once."""
    desk = Desk()
    adoption = Adoption(desk)
    first, second = engine("a", "new"), engine("b", "old")
    comes = asyncio.create_task(adoption.adopt(*first, dict))
    await until(lambda: first[0].fetched)
    waits = asyncio.create_task(adoption.adopt(*second, dict))
    await asyncio.sleep(0)
    desk.may_serve.set()
    await asyncio.gather(comes, waits)
    assert desk.served == [("new", True), ("old", True)]
    assert second[0].facts is second[1]
    assert len(second[0].fetched) == 1
    assert not any(folder.exists() for folder in (*first[0].fetched, *second[0].fetched))

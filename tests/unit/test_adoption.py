"""Engines that come in while the model that is served becomes another one."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from frontend.fleet import adoption
from frontend.fleet.adoption import Adoption
from frontend.messages import EngineFacts
from tests.unit.test_gap import FACTS
from tests.waiting import until
from tidemill.runtime.errors import Unavailable


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
        await sends.wait()
        if digest == "broken":
            raise Unavailable("it is gone")

    sends = asyncio.Event()
    sends.set()
    client = SimpleNamespace(
        fetch_tokenizer=fetch_tokenizer, facts=None, fetched=fetched, sends=sends
    )
    return client, replace(FACTS, instance_id=name, tokenizer_sha256=digest)


async def test_who_found_its_model_served_fetches_when_it_is_not_any_more() -> None:
    """It waited for its turn while an engine of another model came in, which was lost at once."""
    desk = Desk()
    adoption = Adoption(desk)
    first, second = engine("a", "new"), engine("b", "old")
    comes = asyncio.create_task(adoption.adopt(*first, dict))
    await until(adoption._turn.locked)  # it has fetched, and is the one that comes in
    waits = asyncio.create_task(adoption.adopt(*second, dict))
    await asyncio.sleep(0)
    desk.may_serve.set()
    await asyncio.gather(comes, waits)
    assert desk.served == [("new", True), ("old", True)]
    assert second[0].facts is second[1]
    assert len(second[0].fetched) == 1
    assert not any(folder.exists() for folder in (*first[0].fetched, *second[0].fetched))


async def test_one_of_many_is_asked() -> None:
    """Its files lie in memory and on the disk, of each of a thousand engines else."""
    desk = Desk()
    adoption, engines = Adoption(desk), [engine(str(number), "new") for number in range(50)]
    coming = [asyncio.create_task(adoption.adopt(*one, dict)) for one in engines]
    await until(lambda: engines[0][0].fetched)
    desk.may_serve.set()
    await asyncio.gather(*coming)
    assert [len(client.fetched) for client, _ in engines] == [1] + [0] * 49
    assert all(client.facts is facts for client, facts in engines)


async def test_the_next_is_asked_where_one_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other, and no sooner; one that has come in makes it needless."""
    monkeypatch.setattr(adoption, "PATIENCE_S", 0.2)
    desk, engines = Desk(), [engine(str(number), "new") for number in range(9)]
    for client, _ in engines[:3]:
        client.sends.clear()
    desk.may_serve.set()
    comes, begun = Adoption(desk), time.monotonic()
    await asyncio.gather(*(comes.adopt(*one, dict) for one in engines))
    assert [len(client.fetched) for client, _ in engines] == [1] * 4 + [0] * 5
    assert time.monotonic() - begun >= 0.6


async def test_the_next_is_asked_at_once_where_one_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adoption, "PATIENCE_S", 1e6)
    desk, broken, whole = Desk(), engine("a", "broken"), engine("b", "new")
    broken[0].sends.clear()
    desk.may_serve.set()
    comes = Adoption(desk)
    both = [asyncio.create_task(comes.adopt(*one, dict)) for one in (broken, whole)]
    await until(lambda: broken[0].fetched)
    await asyncio.sleep(0)
    assert not whole[0].fetched
    broken[0].sends.set()
    failure, none = await asyncio.gather(*both, return_exceptions=True)
    assert (type(failure), none, len(whole[0].fetched)) == (Unavailable, None, 1)

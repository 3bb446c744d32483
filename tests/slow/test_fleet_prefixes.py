"""Two real engines and a frontend that follows what they cache: who comes back finds its pages."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import httpx
import pytest

from tests.slow.fleets import Site, site, up
from tests.waiting import awake, free_port, http_client

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(600)]

PAGE, ROWS = 16, 8
ENGINE = ("demo", f"--page-size={PAGE}", "--num-pages=1024", "--log-level=warning")
HEARD_S = 2.0
"""For KV events to reach the frontend; they are sent as the pages are sealed."""
Both = tuple[Site, list[int]]
"""Two engines, by their ports."""


class Two:
    """Engines behind a frontend."""

    def __init__(self, made: Site, front: int, client: httpx.AsyncClient) -> None:
        self._made = made
        self._front = front
        self._client = client

    async def routed(self) -> list[int]:
        """Requests that each engine got."""
        told = (await self._client.get("/health")).json()["engines"]
        return [one["requests_routed"] for one in told]

    async def ask(self, prompt: list[int], max_tokens: int = 24) -> tuple[int, list[int]]:
        """Prompt tokens that came out of a cache, and the answer."""
        body = {
            "prompt": prompt,
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "return_token_ids": True,
        }
        answer = await self._client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        told = answer.json()
        cached = told["usage"]["prompt_tokens_details"]["cached_tokens"]
        return cached, list(told["choices"][0]["token_ids"])

    async def talk(self, rng: random.Random, num_turns: int) -> list[tuple[int, int]]:
        """A conversation: of each turn but the first, the tokens that came out of a cache, and
        those of the pages that the turn before had filled."""
        said, found = [rng.randrange(3, 250) for _ in range(100)], []
        for turn in range(num_turns):
            # The last token of an answer is never computed.
            filled = (len(said) - 1) // PAGE * PAGE
            said += [rng.randrange(3, 250) for _ in range(20)]
            cached, answer = await self.ask(said)
            said += answer
            if turn:
                found.append((cached, filled))
            await awake(HEARD_S)
        return found


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    """Two for all tests, whose prompts differ and whose frontends are their own."""
    with site(tmp_path_factory.mktemp("two"), engine_flags=(f"--max-rows={ROWS}",)) as made:
        ports = [free_port(), free_port()]
        for port in ports:
            made.start_engine(port, ENGINE)
        yield made, ports


@asynccontextmanager
async def behind(both: Both, routing: str) -> AsyncIterator[Two]:
    made, ports = both
    made.frontend_flags, front = (f"--routing={routing}",), free_port()
    made.start_frontend(front, *ports)
    await up(made, front, *ports)
    async with http_client(f"http://127.0.0.1:{front}") as client:
        yield Two(made, front, client)
    made.stop(front)


async def conversations(engines: Two, seed: str) -> list[tuple[int, int]]:
    """Of five at once, all turns but the first ones."""
    talks = (engines.talk(random.Random(f"{seed} {number}"), 5) for number in range(5))
    return [turn for talk in await asyncio.gather(*talks) for turn in talk]


async def test_turns_go_where_their_pages_are(both: Both, seed: int) -> None:
    async with behind(both, "prefix_affinity") as engines:
        turns = await conversations(engines, f"{seed}")
        assert [cached for cached, _ in turns] == [filled for _, filled in turns]
        assert min(await engines.routed()) >= 5, "one engine had all conversations"


async def test_control_taking_turns_they_find_less(both: Both, seed: int) -> None:
    async with behind(both, "round_robin") as engines:
        turns = await conversations(engines, f"in turn {seed}")
        missed = sum(cached < filled for cached, filled in turns)
        print(f"{missed} of {len(turns)} turns went elsewhere")
        assert missed


async def test_a_hot_prefix_spreads_and_is_cached_on_both(both: Both, seed: int) -> None:
    """Alone it stays where it is; when everybody asks for it, the other engine gets it too."""
    rng = random.Random(seed)
    hot = [rng.randrange(3, 250) for _ in range(20 * PAGE)]
    async with behind(both, "prefix_affinity") as engines:
        await engines.ask(hot)
        await awake(HEARD_S)
        for number in range(4):
            cached, _ = await engines.ask([*hot, 3 + number])
            assert cached == len(hot)
        assert sorted(await engines.routed()) == [0, 5]

        crowd = (engines.ask([*hot, 3 + number % 200, 3], 100) for number in range(6 * ROWS))
        await asyncio.gather(*crowd)
        assert min(await engines.routed()) >= ROWS, "the cap did not spread it"
        await awake(HEARD_S)
        before = await engines.routed()
        found = await asyncio.gather(*(engines.ask([*hot, 9, 9, n], 2) for n in range(8)))
        assert {cached for cached, _ in found} == {len(hot)}
        assert all(now > then for now, then in zip(await engines.routed(), before, strict=True))

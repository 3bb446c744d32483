"""What requests take from each other over HTTP: cached pages by their salt, turns by priority."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.e2e.real_stack import Faces
from tests.waiting import until

PROMPT = "lookup: abc=1234 xyz=0420 " * 6
ROWS = 4
"""Of the stack's engine."""


async def num_cached(faces: Faces, text: str, **fields: Any) -> int:
    body = {"prompt": text, "max_tokens": 1, **fields}
    answer = await faces.http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


async def test_only_prompts_with_the_same_salt_share_pages(faces: Faces) -> None:
    text = PROMPT + "salted"
    assert await num_cached(faces, text, cache_salt="a") == 0
    shared = await num_cached(faces, text, cache_salt="a")
    assert shared > 0, "control: pages are shared at all"
    for other in ({"cache_salt": "b"}, {"cache_salt": "ab"}, {}):
        assert await num_cached(faces, text, **other) == 0, other
    for own in ({"cache_salt": "a"}, {"cache_salt": "b"}, {}):
        assert await num_cached(faces, text, **own) == shared, own


async def streamed(faces: Faces, told: list[str], name: str, **fields: Any) -> None:
    """Notes the first chunk of a stream, and its end."""
    body = {"prompt": name, "stream": True, "ignore_eos": True, "temperature": 0, **fields}
    async with faces.http.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        begun = False
        async for line in answer.aiter_lines():
            if line.startswith("data: {") and not begun:
                assert "error" not in json.loads(line.removeprefix("data: "))
                told.append(f"{name} begins")
                begun = True
    told.append(f"{name} ends")


@pytest.mark.parametrize(("urgent", "first"), [(5, "late"), (-5, "early"), (0, "early")])
async def test_what_is_urgent_runs_first(faces: Faces, urgent: int, first: str) -> None:
    """All rows but one stay taken, so of the two that wait one runs after the other. The first one
    does not end by itself: the second cannot have begun, however late its chunk is looked for."""
    told: list[str] = []

    def begun() -> list[str]:
        return [one for one in told if one in ("early begins", "late begins")]

    async with asyncio.TaskGroup() as group:
        holding = [
            group.create_task(streamed(faces, told, f"hold {i}", max_tokens=1900))
            for i in range(ROWS)
        ]
        await faces.until_busy(lambda running, *_: running == ROWS)
        asked = {}
        for queued, (name, priority) in enumerate((("early", 0), ("late", urgent)), 1):
            stream = streamed(faces, told, name, max_tokens=1900, priority=priority)
            asked[name] = group.create_task(stream)
            await faces.until_busy(lambda _, waiting, *__, n=queued: waiting == n)
        holding[0].cancel()
        await until(begun)
        await faces.until_busy(lambda running, waiting, *_: (running, waiting) == (ROWS, 1))
        assert begun() == [f"{first} begins"]
        asked[first].cancel()
        await until(lambda: len(begun()) == 2)
        for task in (*holding, *asked.values()):
            task.cancel()
    assert not [one for one in told if one.endswith("ends")]

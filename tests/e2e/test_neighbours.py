"""What requests take from each other over HTTP: cached pages by their salt, turns by priority."""

from __future__ import annotations

import asyncio
import json
from typing import Any

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
    """Notes the first and the last chunk of a stream."""
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


async def test_what_is_urgent_runs_first(faces: Faces) -> None:
    """All rows but one stay taken, so of the two that wait one runs after the other."""
    for urgent, first, second in (
        (5, "late", "early"),
        (-5, "early", "late"),
        (0, "early", "late"),
    ):
        told: list[str] = []
        async with asyncio.TaskGroup() as group:
            holding = [
                group.create_task(streamed(faces, told, f"hold {i}", max_tokens=1900))
                for i in range(ROWS)
            ]
            await faces.until_busy(lambda running, *_: running == ROWS)
            group.create_task(streamed(faces, told, "early", max_tokens=3, priority=0))
            await faces.until_busy(lambda _, queued, *__: queued == 1)
            group.create_task(streamed(faces, told, "late", max_tokens=3, priority=urgent))
            await faces.until_busy(lambda _, queued, *__: queued == 2)
            holding[0].cancel()
            await until(lambda told=told: {"early ends", "late ends"} <= {*told})  # type: ignore[misc]
            for task in holding:
                task.cancel()
        assert not [one for one in told if one.startswith("hold") and one.endswith("ends")]
        order = [one for one in told if not one.startswith("hold")]
        assert order == [
            f"{first} begins", f"{first} ends", f"{second} begins", f"{second} ends"
        ], urgent  # fmt: skip

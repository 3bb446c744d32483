"""Requests of many parts, at a real server: what they cost everybody else."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from frontend.api.openai_response import usage_of
from frontend.choosable import Encoder, bad_word_ids
from frontend.messages import Usage
from tests.service.frontends import stack


async def test_chunks_of_one_step_count_the_usage_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = 0

    def count(usage: Usage) -> dict[str, Any]:
        nonlocal counted
        counted += 1
        return usage_of(usage)

    monkeypatch.setattr("frontend.api.chunks.usage_of", count)
    async with stack(tmp_path) as served, served.http() as client:
        asked = {"include_usage": True, "continuous_usage_stats": True}
        body = {"prompt": ["ab"] * 64, "max_tokens": 4, "stream": True, "stream_options": asked}
        answer = await client.post("/v1/completions", json=body)
    chunks = answer.text.split("\n\n")
    assert '"completion_tokens":256' in chunks[-3]
    assert len(chunks) >= 64
    assert counted < len(chunks) / 2


async def test_long_bad_words_are_read_beside_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = set()

    def read(words: Sequence[str], encoder: Encoder) -> list[tuple[int, ...]]:
        threads.add(threading.current_thread())
        return bad_word_ids(words, encoder)

    monkeypatch.setattr("frontend.choosable.bad_word_ids", read)
    async with stack(tmp_path) as served, served.http() as client:
        body = {"prompt": "ab", "max_tokens": 4, "bad_words": [f"{i:03}" * 300 for i in range(9)]}
        answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert threads
    assert threading.main_thread() not in threads

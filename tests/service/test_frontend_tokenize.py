"""Tokens without a generation: /tokenize and /detokenize in the shapes that vLLM's clients know."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from frontend.tokenizer import Piece, TextTokenizer
from tests.service.frontends import stack

HI = [{"role": "user", "content": "hi é"}]
RENDERED = [261, 104, 105, 32, 0xC3, 0xA9, 262]


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with stack(tmp_path) as served, served.http() as opened:
        yield opened


async def tokenized(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    answer = await client.post("/tokenize", json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def test_a_text(client: httpx.AsyncClient) -> None:
    answer = await tokenized(client, model="fake", prompt="hello")
    assert answer == {"count": 2, "max_model_len": 512, "tokens": [258, 111], "token_strs": None}
    answer = await tokenized(client, prompt="hello é", return_token_strs=True)
    assert answer["token_strs"] == ["hell", "o", " ", "\ufffd", "\ufffd"]
    assert (await tokenized(client, prompt="", add_special_tokens=True))["tokens"] == []


async def test_strings_of_many_tokens_are_made_beside_the_event_loop(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    makers, piece = set(), TextTokenizer.piece

    def made(self: TextTokenizer, token_id: int) -> Piece:
        makers.add(threading.current_thread())
        return piece(self, token_id)

    monkeypatch.setattr(TextTokenizer, "piece", made)
    answer = await tokenized(client, prompt="é" * 20_000, return_token_strs=True)
    assert len(answer["token_strs"]) == answer["count"] == 40_000
    assert makers
    assert threading.main_thread() not in makers


async def test_messages(client: httpx.AsyncClient) -> None:
    assert (await tokenized(client, messages=HI))["tokens"] == RENDERED
    bare = await tokenized(client, messages=HI, add_generation_prompt=False)
    assert bare["tokens"] == RENDERED[:-1]
    begun = [*HI, {"role": "assistant", "content": "a"}]
    continued = await tokenized(client, messages=begun, continue_final_message=True)
    assert continued["tokens"] == [*RENDERED, 97]


async def test_there_and_back(client: httpx.AsyncClient) -> None:
    for text in ("hello", "é\n \N{DOLPHIN}", ""):
        tokens = (await tokenized(client, prompt=text))["tokens"]
        answer = await client.post("/detokenize", json={"tokens": tokens})
        assert answer.json() == {"prompt": text}
    for skip, text in ((True, "hi é"), (False, "<|user|>hi é<|assistant|>")):
        body = {"tokens": RENDERED, "skip_special_tokens": skip}
        assert (await client.post("/detokenize", json=body)).json() == {"prompt": text}


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": HI}, 400, "prompt"),
        ("/tokenize", {"prompt": 5}, 400, "prompt"),
        ("/tokenize", {"messages": [{"role": "user"}]}, 400, "messages[0].content"),
        ("/tokenize", {"prompt": "a", "model": "gpt-9"}, 404, "model"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": [99_999]}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
        ("/detokenize", {"tokens": "a"}, 400, "tokens"),
    ],
)
async def test_wrong_requests(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], status: int, param: str
) -> None:
    answer = await client.post(path, json=body)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["param"] == param


async def test_the_schema_names_every_body(client: httpx.AsyncClient) -> None:
    paths = (await client.get("/openapi.json")).json()["paths"]
    posts = {path: verbs["post"] for path, verbs in paths.items() if "post" in verbs}
    assert {"/tokenize", "/detokenize", "/v1/chat/completions", "/v1/messages"} <= set(posts)
    for path, verb in posts.items():
        if not path.endswith(("/cancel", "/ping")):
            assert "application/json" in verb["requestBody"]["content"], path

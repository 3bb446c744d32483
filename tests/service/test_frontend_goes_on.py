"""Completions go on in the text of their prompt, answers in a chat begin one: of vocabularies that
write a space in front of a word, which is none where a text begins."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers

from tests.service.fake_engine import FakeEngine
from tests.service.frontends import Stack, frontend_for, serving, stack
from tests.waiting import PATIENCE_S

SEA, TIDE = 257, 258
SHOWN = "{{ messages[-1].content }}"
ASKED = [{"role": "user", "content": " tide sea"}]
BEGUN = [*ASKED, {"role": "assistant", "content": " sea"}]


def write(folder: Path) -> Tokenizer:
    """Llama 2's way: words with a mark, all else as bytes."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁sea", "▁tide"]
    raw = Tokenizer(
        models.Unigram([(piece, -1.0) for piece in pieces], unk_id=0, byte_fallback=True)
    )
    raw.normalizer = normalizers.Replace(" ", "▁")
    raw.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    raw.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": SHOWN}))
    return raw


@pytest.mark.parametrize("streams", [False, True])
async def test_the_first_space_is_there_where_a_text_goes_on(tmp_path: Path, streams: bool) -> None:
    raw = write(tmp_path)
    assert raw.encode(" tide sea").ids == [TIDE, SEA]
    fake = FakeEngine(tmp_path, raw.get_vocab_size(), eos=(0,))  # which echoes
    async with serving(fake) as port, frontend_for(port) as frontend:
        assert await frontend.desk.fleet.wait_ready(PATIENCE_S)
        async with Stack(fake, frontend, raw).http() as client:

            async def said(path: str, **body: Any) -> str:
                asked = {"max_tokens": 2, "stream": streams, **body}
                answer = await client.post(path, json=asked)
                if not streams:
                    (choice,) = answer.json()["choices"]
                    return str(choice.get("text") or choice["message"]["content"])
                events = [line[6:] for line in answer.text.splitlines() if line[:6] == "data: "]
                told = [json.loads(event)["choices"][0] for event in events if event != "[DONE]"]
                return "".join(
                    one.get("text") or one.get("delta", {}).get("content") or "" for one in told
                )

            completions, chats = "/v1/completions", "/v1/chat/completions"
            assert await said(completions, prompt=[SEA, TIDE]) == " sea tide"
            assert await said(completions, prompt=" tide sea") == " tide sea"
            whole = await said(completions, prompt=" tide sea", echo=True)
            assert whole == " tide sea tide sea"
            assert await said(completions, prompt=" tide sea", stop=" sea") == " tide"
            assert await said(chats, messages=ASKED) == "tide sea"
            goes_on = {"continue_final_message": True, "add_generation_prompt": False}
            assert await said(chats, messages=BEGUN, **goes_on) == " sea sea"


@pytest.mark.parametrize(
    ("begun", "is_reasoning"), [("", True), ("It is", False), ("<think>Hm", True)]
)
async def test_what_goes_on_with_an_answer_is_no_reasoning(
    tmp_path: Path, begun: str, is_reasoning: bool
) -> None:
    """Of a model that reasons first and whose template does not show it."""
    turns = [{"role": "user", "content": "so"}]
    turns += [{"role": "assistant", "content": begun}] if begun else []
    asked = {"messages": turns, "max_tokens": 2}
    goes_on = {"continue_final_message": True, "add_generation_prompt": False} if begun else {}
    async with stack(tmp_path, reasoning_parser="deepseek_r1") as served, served.http() as client:
        chat = (await client.post("/v1/chat/completions", json={**asked, **goes_on})).json()
        message = (await client.post("/v1/messages", json={"model": "fake", **asked})).json()
    (choice,) = chat["choices"]
    assert bool(choice["message"].get("content")) != is_reasoning
    assert bool(choice["message"].get("reasoning")) == is_reasoning
    text = "".join(block.get("text", "") for block in message["content"])
    assert bool(text) != is_reasoning

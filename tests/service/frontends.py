"""A byte-level tokenizer and a running frontend for tests."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from frontend.app import FrontendServer
from frontend.config import FrontendConfig
from tests.service.fake_engine import FakeEngine, serving
from tests.waiting import PATIENCE_S, http_client
from tests.waiting import until as until

TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIALS = ("<|eos|>", "<|user|>", "<|assistant|>", "<|system|>", "<|mask|>")


def byte_tokenizer() -> Tokenizer:
    """Token i is byte i, then a few merges, then special tokens."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    rest = [byte for byte in range(256) if byte not in printable]
    names = [chr(b) if b in printable else chr(256 + rest.index(b)) for b in range(256)]
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("o", "r")]
    vocab = {name: i for i, name in enumerate([*names, *("".join(pair) for pair in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIALS))
    return tokenizer


def write_tokenizer(folder: Path, *, template: str | None = TEMPLATE) -> Tokenizer:
    """The byte tokenizer as a model folder; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = byte_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|eos|>", "bos_token": None, "model_max_length": 512}
    if template is not None:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return tokenizer


class Stack(NamedTuple):
    """A fake engine behind a real frontend."""

    engine: FakeEngine
    frontend: FrontendServer
    tokenizer: Tokenizer

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.frontend.http_port}"

    def http(self) -> httpx.AsyncClient:
        """A new client of the HTTP face."""
        return http_client(self.url)

    @property
    def grpc_address(self) -> str:
        return f"127.0.0.1:{self.frontend.grpc_port}"


def make_engine(folder: Path, **fields: Any) -> tuple[FakeEngine, Tokenizer]:
    """A fake engine with the byte tokenizer in `folder`."""
    tokenizer = write_tokenizer(folder / "tokenizer")
    eos = tokenizer.token_to_id("<|eos|>")
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    return FakeEngine(folder / "tokenizer", size, eos=(eos,), **fields), tokenizer


@asynccontextmanager
async def frontend_for(port: int, **flags: Any) -> AsyncIterator[FrontendServer]:
    """A frontend on free ports for the engine at `port`."""
    config = FrontendConfig(engine=f"127.0.0.1:{port}", **{"http_port": 0, "grpc_port": 0, **flags})
    frontend = await FrontendServer.start(config)
    try:
        yield frontend
    finally:
        await frontend.stop()


@asynccontextmanager
async def stack(
    folder: Path, *, engine: dict[str, Any] | None = None, **flags: Any
) -> AsyncIterator[Stack]:
    """Engine and frontend, connected."""
    fake, tokenizer = make_engine(folder, **(engine or {}))
    async with serving(fake) as port, frontend_for(port, **flags) as frontend:
        assert await frontend.desk.fleet.wait_ready(PATIENCE_S), frontend.desk.fleet.last_error
        yield Stack(fake, frontend, tokenizer)

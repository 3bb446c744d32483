"""The parts of `bench online`: the synthetic tokenizer, and what a client counts in a stream."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any, cast

import pytest

from engine_service.config import EngineConfig
from frontend.tokenizer import TextTokenizer
from tests.waiting import PATIENCE_S
from tidemill.bench import online
from tidemill.bench.streams import Observed, Request, Stream, joined
from tidemill.bench.tokenizer import words, write_tokenizer
from tidemill.runtime.errors import InvalidRequest

MARK = b'"text":'
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
REFUSAL = b'HTTP/1.1 400 Bad Request\r\n\r\n{"error":{"message":"too long"}}'
ASKED = Request([1, 2], max_tokens=4, temperature=0.0)


def chunked(*events: bytes) -> bytes:
    """Each event as an HTTP chunk of its own, and the end of the answer."""
    framed = [b"data: " + event + b"\n\n" for event in (*events, b"[DONE]")]
    return b"".join(b"%x\r\n%b\r\n" % (len(one), one) for one in framed) + b"0\r\n\r\n"


def answer(*texts: bytes, counted: int) -> bytes:
    """A stream with one event per text and a usage at its end."""
    events = [b'{"choices":[{"index":0,"text":"' + text + b'"}],"usage":null}' for text in texts]
    usage = b'{"choices":[],"usage":{"prompt_tokens":2,"completion_tokens":%d}}' % counted
    return HEAD + chunked(*events, usage)


TEXTS = (b" sail", b'\\"text\\":', b" text:", b"")
"""The second one is the mark itself, as JSON writes it in a string."""


class Sink:
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        self.written = b""

    def write(self, content: bytes) -> None:
        self.written += content


async def ask(*pieces: bytes) -> Observed:
    """What is observed of one request whose answer arrives in these pieces."""
    seen, sink = Observed(began=0.0, ended=0.0, cpu_s=0.0), Sink()
    stream = Stream(seen)
    stream.connection_made(cast("Any", sink))
    asking = asyncio.create_task(stream.ask(ASKED, b"a request"))
    await asyncio.sleep(0)
    assert sink.written == b"a request"
    for piece in pieces:
        assert not asking.done()
        stream.data_received(piece)
    async with asyncio.timeout(PATIENCE_S):
        await asking
    return seen


def cut(content: bytes, rng: random.Random, count: int) -> list[bytes]:
    at = sorted(rng.sample(range(1, len(content)), count))
    return [content[i:j] for i, j in zip([0, *at], [*at, len(content)], strict=True)]


async def test_every_text_is_counted_however_the_answer_is_cut(seed: int) -> None:
    rng, content = random.Random(seed), answer(*TEXTS, counted=4)
    singly = [content[i : i + 1] for i in range(len(content))]
    for pieces in [[content], singly, *(cut(content, rng, n) for n in (1, 2, 5, 20, 50))]:
        seen = await ask(*pieces)
        assert (seen.tokens, seen.events) == (4, len(TEXTS))
        assert len(seen.first_s) == 1
        assert all(gap >= 0 for gap in seen.gap_s)
    assert sum(piece.count(MARK) for piece in singly) == 0  # counting piece by piece would fail
    assert len((await ask(*singly)).gap_s) == len(TEXTS) - 1
    assert (await ask(content)).gap_s == []


async def test_a_refusal_and_a_wrong_number_of_tokens_are_failures() -> None:
    with pytest.raises(RuntimeError, match="too long"):
        await ask(REFUSAL)
    with pytest.raises(RuntimeError, match="not 4 tokens"):
        await ask(answer(*TEXTS, counted=3))


async def test_a_lost_connection_is_a_failure() -> None:
    stream = Stream(Observed(began=0.0, ended=0.0, cpu_s=0.0))
    stream.connection_made(cast("Any", Sink()))
    asking = asyncio.create_task(stream.ask(ASKED, b""))
    await asyncio.sleep(0)
    stream.connection_lost(ConnectionResetError("by the peer"))
    with pytest.raises(RuntimeError, match="by the peer"):
        await asking


def test_clients_are_joined() -> None:
    one = Observed(1.0, 5.0, 0.5, tokens=3, events=2, first_s=[0.1], gap_s=[0.2])
    two = Observed(2.0, 6.0, 0.75, tokens=4, events=4, first_s=[0.3], gap_s=[])
    assert joined([one, two]) == Observed(1.0, 6.0, 0.75, 7, 6, [0.1, 0.3], [0.2])


def test_every_id_reads_as_a_distinct_short_ascii_text(tmp_path: Path) -> None:
    size = 12_000
    write_tokenizer(tmp_path, size)
    tokenizer = TextTokenizer(tmp_path)
    texts = [tokenizer.detokenizer(skip_special_tokens=True).feed([i]) for i in range(size)]
    assert len(set(texts)) == size
    assert all(text.isascii() and 1 <= len(text) <= 5 for text in texts)
    ids = tokenizer.encode("a text, asked", add_special_tokens=True)
    assert "".join(texts[i] for i in ids) == "a text, asked"


def test_a_vocabulary_has_to_fit() -> None:
    assert len(set(words(151_936))) == 151_936
    for size in (94, 26**4 + 96):
        with pytest.raises(ValueError, match="no synthetic tokenizer"):
            words(size)


def test_every_frontend_needs_a_stream() -> None:
    with pytest.raises(InvalidRequest, match="needs a stream"):
        online.run(online.OnlineOptions(concurrency=2, frontends=3), EngineConfig())

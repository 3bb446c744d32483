"""Requests of a batch over HTTP: how often one is asked, how long is waited, what is written."""

from __future__ import annotations

import asyncio
import json
import random
import ssl
import time
from email.utils import formatdate
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.certificates import Authority
from tidemill.commands import batch_requests
from tidemill.commands.batch_lines import Request
from tidemill.commands.batch_requests import Outcome, Server, base_url, pause_s, retry_after_s
from tidemill.runtime.errors import InvalidRequest

BODY = {"prompt": "add: 1+2 ="}


def test_pauses_grow_and_are_as_long_as_the_server_says(seed: int) -> None:
    random.seed(seed)
    for num_retries, least in enumerate([0.5, 1, 2, 4, 8, 8, 8]):
        assert least <= pause_s(num_retries, 0.0) <= 1.25 * least
    assert 8 <= pause_s(10**6, 0.0) <= 10
    assert 30 <= pause_s(0, 30.0) <= 37.5
    assert 8 <= pause_s(9, 1.0) <= 10
    assert 120 <= pause_s(0, 1e9) <= 150


def test_retry_after() -> None:
    now = time.time()
    assert retry_after_s("7", now) == 7.0
    assert 8.0 <= retry_after_s(formatdate(now + 10, usegmt=True), now) <= 10.0
    for text in ("", "soon", "-1", "nan", formatdate(now - 10, usegmt=True), "9" * 5000):
        assert retry_after_s(text, now) == 0.0
    assert retry_after_s("Wed, 32 Foo 99999 00:00:00 GMT", now) == 0.0


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("http://h:1", "http://h:1"),
        ("https://h/v1/", "https://h"),
        ("http://h/p/v1", "http://h/p"),
    ],
)
def test_addresses(url: str, base: str) -> None:
    assert base_url(url) == httpx.URL(base)


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://h", "http://", "http://h:x", ""])
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(InvalidRequest, match="--url is"):
        base_url(url)


Script = list[int | httpx.TransportError]


class Asking:
    """A server that follows a script and then answers 200, without any waiting."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, max_retries: int, script: Script, **answer: Any
    ) -> None:
        self.num_asked = 0
        self.told: list[str] = []
        self.pauses: list[tuple[int, float]] = []
        self._answer = {"json": {"text": "3"}} | answer
        self._script = script
        self._client = httpx.AsyncClient(
            base_url="http://h", transport=httpx.MockTransport(self._respond)
        )
        self.server = Server(self._client, max_retries, self.told.append)
        monkeypatch.setattr(batch_requests, "pause_s", self._pause_s)

    def _pause_s(self, num_retries: int, told_s: float) -> float:
        self.pauses.append((num_retries, told_s))
        return 0.0

    def _respond(self, request: httpx.Request) -> httpx.Response:
        self.num_asked += 1
        assert json.loads(request.content) == BODY
        step = self._script.pop(0) if self._script else 200
        if isinstance(step, Exception):
            raise step
        headers = {"x-request-id": f"r{self.num_asked}", "retry-after": "3"}
        return httpx.Response(step, headers=headers, **self._answer)

    async def ask(self) -> Outcome:
        return await self.server.ask(Request(1, "a", "/v1/completions", json.dumps(BODY).encode()))


async def test_passing_failures_are_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = httpx.ConnectError("refused")
    lost = httpx.RemoteProtocolError("disconnected")
    asking = Asking(monkeypatch, 5, [gone, 503, 429, lost, 502])
    outcome = await asking.ask()
    assert not outcome.failure
    assert outcome.line["response"] == {
        "status_code": 200,
        "request_id": "r6",
        "body": {"text": "3"},
    }
    assert asking.told == ["no_connection", "HTTP 503", "HTTP 429", "no_connection", "HTTP 502"]
    assert asking.pauses == [(0, 0.0), (1, 3.0), (2, 3.0), (3, 0.0), (4, 3.0)]


@pytest.mark.parametrize("status", [400, 404, 413, 422, 500, 504])
async def test_lasting_failures_are_not(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asking = Asking(monkeypatch, 5, [status], json={"error": {"message": "no"}})
    outcome = await asking.ask()
    assert (outcome.failure, asking.num_asked) == (f"HTTP {status}", 1)
    assert outcome.line["response"]["body"] == {"error": {"message": "no"}}
    assert outcome.line["error"] is None


@pytest.mark.parametrize("secure", [True, False])
async def test_tls_that_cannot_be_used_is_told_and_not_tried_again(
    secure: bool, tmp_path: Path
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*Authority(tmp_path, "ca").sign("server"))

    async def refuse(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    told: list[str] = []
    listener = await asyncio.start_server(refuse, "127.0.0.1", 0, ssl=context if secure else None)
    port = listener.sockets[0].getsockname()[1]
    async with listener, httpx.AsyncClient(base_url=f"https://127.0.0.1:{port}") as client:
        request = Request(1, "a", "/v1/completions", json.dumps(BODY).encode())
        outcome = await Server(client, 1, told.append).ask(request)
    assert (told, outcome.line["error"]["code"]) == ([], "no_connection")
    assert ("SSL_CERT_FILE" if secure else "speaks no TLS") in outcome.failure


async def test_no_answer_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    asking = Asking(monkeypatch, 5, [httpx.ReadTimeout("")])
    outcome = await asking.ask()
    assert asking.num_asked == 1
    assert (outcome.failure, outcome.line["response"]) == ("timeout", None)
    assert outcome.line["error"] == {"code": "timeout", "message": "ReadTimeout"}


async def test_an_answer_that_is_not_json(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = await Asking(monkeypatch, 5, [], json=None, text="<html>").ask()
    assert outcome.failure == "not_json"
    assert outcome.line["response"]["status_code"] == 200
    assert "<html>" in outcome.line["error"]["message"]


async def test_retries_are_bounded_and_nobody_waits_again_for_a_server_that_is_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asking = Asking(monkeypatch, 3, [503] * 4 + [httpx.ConnectError("refused"), 503])
    assert (await asking.ask()).line["response"]["status_code"] == 503
    assert asking.num_asked == 4
    assert (await asking.ask()).line["error"]["code"] == "no_connection"
    assert asking.num_asked == 5, "one attempt"
    assert (await asking.ask()).failure == "HTTP 503"
    assert not (await asking.ask()).failure
    asking._script += [503, 503]
    assert not (await asking.ask()).failure, "it was back, so it is waited for again"


async def test_a_server_that_answers_others_is_not_away(monkeypatch: pytest.MonkeyPatch) -> None:
    asking = Asking(monkeypatch, 1, [429, 200, 429, 429, 200])
    outcomes = await asyncio.gather(asking.ask(), asking.ask())
    assert sorted(outcome.failure for outcome in outcomes) == ["", "HTTP 429"]
    assert not (await asking.ask()).failure, "429 and then 200: asked twice"

"""Everything that clients do to a server, mixed at random, each answer checked on the spot.

It does not know how the server was started, nor what it may hold afterwards.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Any

import grpc
import httpx

from tests.e2e.real_stack import Faces
from tidemill.bench.tasks import held_out
from tidemill.v1 import engine_pb2, text_pb2

NUM_CLIENTS = 20
ANSWER_S = 120.0
ENDLESS = {"max_tokens": 1200, "ignore_eos": True}
TEXT_KINDS = {
    (False, False): ("Generate", text_pb2.TextServiceGenerateRequest),
    (False, True): ("GenerateStream", text_pb2.GenerateStreamRequest),
    (True, False): ("Chat", text_pb2.ChatRequest),
    (True, True): ("ChatStream", text_pb2.ChatStreamRequest),
}


@dataclass(frozen=True)
class Ask:
    """A request whose answer depends on nothing but itself: greedy, or seeded."""

    prompt: str
    chat: bool = False
    max_tokens: int = 80
    temperature: float = 0.0
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def http(self) -> tuple[str, dict[str, Any]]:
        """Path and body."""
        names = ("max_tokens", "temperature", "seed", "n", "ignore_eos")
        body: dict[str, Any] = {name: getattr(self, name) for name in names}
        body["stop"] = list(self.stop) or None
        if not self.chat:
            return "/v1/completions", body | {"prompt": self.prompt}
        messages = [{"role": "user", "content": self.prompt}]
        return "/v1/chat/completions", body | {"messages": messages}

    def text(self, stream: bool) -> tuple[str, Any]:
        """Method and request of TextService."""
        sampling = engine_pb2.SamplingParams(
            max_tokens=self.max_tokens, temperature=self.temperature, seed=self.seed
        )
        options = text_pb2.TextOptions(
            sampling=sampling, n=self.n, stop=self.stop, ignore_eos=self.ignore_eos
        )
        method, kind = TEXT_KINDS[self.chat, stream]
        if self.chat:
            message = text_pb2.ChatMessage(role="user", parts=[{"text": self.prompt}])
            return method, kind(messages=[message], options=options)
        return method, kind(prompt={"text": self.prompt}, options=options)


def asks() -> list[Ask]:
    """Short and long, cut by stop strings, with several choices."""
    items = held_out(14)
    made = [Ask(item.prompt, chat=True) for item in items[:7]]
    made += [Ask(f"{item.prompt} =") for item in items[7:]]
    made += [Ask("count: 37 n=5 =", stop=("40",)), Ask("repeat: tide n=5", True, stop=("de ti",))]
    made += [Ask("To be, or", max_tokens=150, ignore_eos=True), Ask("a", max_tokens=1)]
    made += [Ask("count: 3 n=6", chat=True, n=3, temperature=1.0, seed=11)]
    made += [Ask("Enter the king", n=2, temperature=0.9, seed=5, max_tokens=60)]
    return made


class Choices:
    """The choices of one stream; a second end, or text after the end, fails."""

    def __init__(self, ask: Ask) -> None:
        self.texts = [""] * ask.n
        self.reasons = [""] * ask.n

    def add(self, index: int, text: str, reason: str | None) -> None:
        assert not self.reasons[index], "something after the end of a choice"
        self.texts[index] += text
        self.reasons[index] = reason or ""

    def whole(self) -> list[str]:
        assert all(self.reasons), f"a choice has no end: {self.reasons}"
        return self.texts


def error_of(event: dict[str, Any]) -> str:
    return str(event.get("error", {}).get("code", ""))


class Traffic:
    """Clients of one server. `ends` counts requests by kind, each of which got its one end."""

    def __init__(self, faces: Faces, rng: random.Random) -> None:
        self._faces = faces
        self._rng = rng
        self._handles = count(1)
        self.expected: dict[Ask, list[str]] = {}
        self.ends: Counter[str] = Counter()
        self._kinds: dict[str, Callable[[], Awaitable[None]]] = {
            "HTTP": lambda: self._whole(self.http_once),
            "HTTP stream": lambda: self._whole(self.http_stream),
            "gRPC": lambda: self._whole(self.text_once),
            "gRPC stream": lambda: self._whole(self.text_stream),
            "slow HTTP reader": lambda: self._whole(self.http_stream, pause_s=0.05),
            "slow gRPC reader": lambda: self._whole(self.text_stream, pause_s=0.05),
            "HTTP client gone": self._leave_http,
            "gRPC client gone": self._leave_text,
            "HTTP deadline": self._http_deadline,
            "gRPC deadline": self._text_deadline,
            "bad HTTP request": self._bad_http,
            "bad gRPC request": self._bad_text,
        }

    async def learn(self) -> None:
        """What an idle server answers, one request at a time."""
        for ask in asks():
            self.expected[ask] = await self.http_once(ask)

    async def run(self, seconds: float) -> None:
        """All clients at once for so long; then every one of them finishes what it began."""
        stop = time.monotonic() + seconds
        async with asyncio.TaskGroup() as group:
            for _ in range(NUM_CLIENTS):
                group.create_task(self._client(stop))
            group.create_task(self._session(stop))

    async def _client(self, stop: float) -> None:
        while time.monotonic() < stop:
            kind = self._rng.choice(list(self._kinds))
            async with asyncio.timeout(ANSWER_S):
                await self._kinds[kind]()
            self.ends[kind] += 1

    async def _session(self, stop: float) -> None:
        """Handles on the engine's own stream, half of them aborted at some moment."""
        session, rng = self._faces.session, self._rng
        while time.monotonic() < stop:
            handles = [next(self._handles) for _ in range(8)]
            for handle in handles:
                prompt = [rng.randrange(3, 250) for _ in range(rng.randint(1, 40))]
                await session.submit(
                    handle,
                    *prompt,
                    max_tokens=rng.randint(1, 120),
                    priority=rng.randint(-1, 1),
                    fairness_key=rng.choice(["", "anna", "ben"]),
                )
            await session.read()
            gone = engine_pb2.AbortHandles(handles=handles[:4])
            await session.send(abort=gone)
            async with asyncio.timeout(ANSWER_S):
                await session.drain(*handles)
            assert [len(session.ends[handle]) for handle in session.ends] == [1] * len(session.ends)
            self.ends["handle"] += len(handles)

    async def _whole(self, answer: Any, **options: Any) -> None:
        ask = self._rng.choice(list(self.expected))
        got = await answer(ask, **options)
        assert got == self.expected[ask], f"{ask}: {got}, idle server: {self.expected[ask]}"

    async def http_once(self, ask: Ask) -> list[str]:
        path, body = ask.http()
        answer = await self._faces.http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        choices = Choices(ask)
        for one in answer.json()["choices"]:
            text = one["message"]["content"] if ask.chat else one["text"]
            choices.add(one["index"], text, one["finish_reason"])
        return choices.whole()

    async def http_stream(self, ask: Ask, pause_s: float = 0.0) -> list[str]:
        choices = Choices(ask)
        async for event in self._events(ask):
            assert not error_of(event), event
            for one in event["choices"]:
                text = one["delta"].get("content") if ask.chat else one["text"]
                choices.add(one["index"], text or "", one["finish_reason"])
            await asyncio.sleep(pause_s)
        return choices.whole()

    async def _events(self, ask: Ask, **headers: str) -> AsyncIterator[dict[str, Any]]:
        """Up to the one [DONE], behind which there is nothing."""
        path, body = ask.http()
        asked = self._faces.http.stream(
            "POST", path, json={**body, "stream": True}, headers=headers
        )
        async with asked as answer:
            if answer.status_code != 200:
                yield json.loads(await answer.aread())
                return
            lines = [""]
            async for line in answer.aiter_lines():
                if line.startswith("data:"):
                    lines.append(line)
                    assert "data: [DONE]" not in lines[:-1], "something after [DONE]"
                    if line != "data: [DONE]":
                        yield json.loads(line.removeprefix("data:"))
            assert lines[-1] == "data: [DONE]"

    async def text_once(self, ask: Ask) -> list[str]:
        method, request = ask.text(stream=False)
        answer = await getattr(self._faces.text, method)(request)
        choices = Choices(ask)
        for one in answer.choices:
            choices.add(one.index, self._text(one), one.finish_reason)
        return choices.whole()

    async def text_stream(self, ask: Ask, pause_s: float = 0.0) -> list[str]:
        method, request = ask.text(stream=True)
        call, choices = getattr(self._faces.text, method)(request), Choices(ask)
        while (message := await call.read()) is not grpc.aio.EOF:
            if message.HasField("choice"):
                one = message.choice
                choices.add(one.index, self._text(one), one.finish_reason)
            await asyncio.sleep(pause_s)
        return choices.whole()

    @staticmethod
    def _text(choice: Any) -> str:
        if isinstance(choice, text_pb2.TextChoice):
            return choice.text
        return "".join(part.text for part in choice.message.parts)

    def _endless(self) -> Ask:
        return Ask(f"{self._rng.random()}", **ENDLESS)

    async def _leave_http(self) -> None:
        """Before the first byte, between two, or without reading at all."""
        ask = self._endless()
        call = self.http_once(ask) if self._rng.random() < 0.3 else self.http_stream(ask)
        with suppress(TimeoutError, httpx.ReadError):
            await asyncio.wait_for(call, self._rng.random() * 0.8)

    async def _leave_text(self) -> None:
        stream = self._rng.random() < 0.7
        method, request = self._endless().text(stream)
        call = getattr(self._faces.text, method)(request)
        if stream and self._rng.random() < 0.7:
            await call.read()
        await asyncio.sleep(self._rng.random() * 0.5)
        call.cancel()
        assert await call.code() is grpc.StatusCode.CANCELLED

    def _deadline_s(self) -> float:
        return self._rng.choice([0.001, 0.02, 0.1, 0.4])

    async def _http_deadline(self) -> None:
        headers = {"x-request-timeout-ms": str(round(self._deadline_s() * 1000))}
        events = [event async for event in self._events(self._endless(), **headers)]
        assert error_of(events[-1]) == "deadline_exceeded", events[-1]
        assert not any(error_of(event) for event in events[:-1])

    async def _text_deadline(self) -> None:
        method, request = self._endless().text(stream=False)
        call = getattr(self._faces.text, method)(request, timeout=self._deadline_s())
        assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED

    async def _bad_http(self) -> None:
        path, body = Ask("a").http()
        wrong = self._rng.choice([{"top_p": 0}, {"prompt": ""}, {"n": 0}, {"prompt": "a" * 3000}])
        answer = await self._faces.http.post(path, json={**body, **wrong})
        assert answer.status_code == 400, answer.text

    async def _bad_text(self) -> None:
        wrong = self._rng.choice([Ask(""), Ask("a", max_tokens=-3), Ask("a", temperature=-1.0)])
        method, request = wrong.text(stream=self._rng.random() < 0.5)
        call = getattr(self._faces.text, method)(request)
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT

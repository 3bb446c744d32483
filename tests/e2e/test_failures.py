"""Every way in which one request can fail, through both public faces: status, words and details.

Beside it another request runs and does not notice, and nothing of the failed one is left.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import grpc
import pytest

from tests.e2e.real_stack import (
    Faces,
    Stack,
    connected,
    engine,
    frontend,
    good,
    settled,
    until_idle,
)
from tests.service.engine_fixtures import rest
from tests.waiting import free_port
from tidemill.runtime.rpc import to_error
from tidemill.v1 import engine_pb2 as pb
from tidemill.v1 import text_pb2

ENDLESS = pb.StopSpec(ignore_eos=True)
NEIGHBOUR, CROWD, STAYS = 1, range(2, 6), 1900
MAX_MODEL_LEN = 2048
Code = grpc.StatusCode


class Row(NamedTuple):
    """How a request is made to fail; `http` are fields of its body, `text` of its options."""

    http: dict[str, Any]
    text: dict[str, Any]
    status: int
    kind: str
    code: str
    """ErrorInfo's reason, and OpenAI's code in lower case."""
    grpc: Code
    words: str
    prompt: str = "a"
    timeout_ms: int | None = None
    is_crowded: bool = False
    """No row is free, and nobody more may wait."""


INVALID = (400, "invalid_request_error")
TABLE = {
    "empty prompt": Row(
        {}, {}, *INVALID, "INVALID_ARGUMENT", Code.INVALID_ARGUMENT, "empty", prompt=""
    ),
    "too long": Row(
        {"max_tokens": MAX_MODEL_LEN},
        {"sampling": {"max_tokens": MAX_MODEL_LEN}},
        *INVALID, "CONTEXT_LENGTH_EXCEEDED", Code.INVALID_ARGUMENT, f"length is {MAX_MODEL_LEN}",
    ),
    "bad range": Row(
        {"temperature": -1.0},
        {"sampling": {"temperature": -1.0}},
        *INVALID, "INVALID_ARGUMENT", Code.INVALID_ARGUMENT, "temperature is -1",
    ),
    "unknown model": Row(
        {"model": "gpt-9"},
        {"model": "gpt-9"},
        404, "not_found_error", "MODEL_NOT_FOUND", Code.NOT_FOUND, "'gpt-9' does not exist",
    ),
    "deadline": Row(
        {"max_tokens": STAYS, "ignore_eos": True},
        {"sampling": {"max_tokens": STAYS}, "ignore_eos": True},
        504, "timeout_error", "DEADLINE_EXCEEDED", Code.DEADLINE_EXCEEDED,
        r"within 0\.2|Deadline Exceeded", timeout_ms=200,
    ),
    "full queue": Row(
        {}, {},
        429, "overloaded_error", "QUEUE_FULL", Code.RESOURCE_EXHAUSTED, "requests are waiting",
        is_crowded=True,
    ),
    "generation": Row(
        {"allowed_token_ids": [5], "guided_choice": ["tide"]},
        {"sampling": {"allowed_token_ids": [5]}, "constraint": {"choice": {"values": ["tide"]}}},
        *INVALID, "GENERATION_DEAD_END", Code.INVALID_ARGUMENT, "no token is left",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Four rows, and room for one request more."""
    folder, port = tmp_path_factory.mktemp("small"), free_port()
    flags = ("demo", "--max-queued-requests=1")
    with engine(folder, port, *flags) as served, frontend(folder, port) as running:
        running.wait_ready()
        running.services |= {"engine": served.pid, "rank": served.rank_pid}
        yield running


@pytest.fixture
async def faces(small: Stack) -> AsyncIterator[Faces]:
    """Checks after the test that other requests are served and that nothing is left over."""
    async with settled(small), connected(small) as opened:
        yield opened
        await good(opened)
        await until_idle(opened)


@asynccontextmanager
async def beside(faces: Faces, row: Row) -> AsyncIterator[None]:
    """Somebody else's request runs before and after; more of them where the row says so."""
    handles = [NEIGHBOUR, *(CROWD if row.is_crowded else ())]
    for handle in handles:
        await faces.session.submit(handle, 5 + handle, max_tokens=STAYS, stop=ENDLESS)
        if handle != CROWD[-1]:
            await faces.session.first_token(handle)
    if row.is_crowded:
        await faces.until_busy(lambda running, waiting, *_: (running, waiting) == (4, 1))
    yield
    before = len(faces.session.tokens[NEIGHBOUR])
    while len(faces.session.tokens[NEIGHBOUR]) < before + 20:
        assert await faces.session.read() is not None
    assert not faces.session.ends, "only the request that failed has ended"
    await faces.session.send(abort=pb.AbortHandles(handles=handles))
    await faces.session.drain(*handles)


async def failures(faces: Faces, kind: str) -> float:
    """As the frontend counts them."""
    text = (await faces.http.get("/metrics")).text
    found = re.findall(rf'^tidemill_request_failure_total\{{.*"{kind}".*\}} (\S+)', text, re.M)
    return sum(map(float, found))


@pytest.mark.parametrize("name", TABLE)
@pytest.mark.parametrize("stream", [False, True])
async def test_http(faces: Faces, name: str, stream: bool) -> None:
    row = TABLE[name]
    before = await failures(faces, row.code.lower())
    headers = {} if row.timeout_ms is None else {"x-request-timeout-ms": str(row.timeout_ms)}
    body = {"prompt": row.prompt, "max_tokens": 4, "stream": stream, **row.http}
    async with beside(faces, row):
        answer = await faces.http.post("/v1/completions", json=body, headers=headers)
    if stream and answer.status_code == 200:  # it had begun: the error is the last event
        *_, last, done = (line for line in answer.text.splitlines() if line)
        assert (row.code, done) == ("DEADLINE_EXCEEDED", "data: [DONE]")
        error = json.loads(last.removeprefix("data: "))["error"]
    else:
        assert answer.status_code == row.status, answer.text
        error = answer.json()["error"]
    assert (error["type"], error["code"]) == (row.kind, row.code.lower())
    assert re.search(row.words, error["message"]), error
    assert ("retry-after" in answer.headers) is (row.status == 429)
    counts = row.status != 404  # there is no model that it could be counted for
    assert await failures(faces, row.code.lower()) == before + counts, "it counts as failed"


@pytest.mark.parametrize("name", TABLE)
@pytest.mark.parametrize("stream", [False, True])
async def test_grpc(faces: Faces, name: str, stream: bool) -> None:
    row = TABLE[name]
    kind = text_pb2.GenerateStreamRequest if stream else text_pb2.TextServiceGenerateRequest
    options = {"sampling": {"max_tokens": 4}, **row.text}
    asked = kind(prompt={"text": row.prompt}, options=options)
    timeout = None if row.timeout_ms is None else row.timeout_ms / 1000
    async with beside(faces, row):
        call = getattr(faces.text, "GenerateStream" if stream else "Generate")(
            asked, timeout=timeout
        )
        with pytest.raises(grpc.aio.AioRpcError, match=row.words) as caught:
            await (rest(call) if stream else call)
    assert caught.value.code() is row.grpc
    error = to_error(caught.value)
    assert error.reason == row.code, "gRPC's own word for its own deadline is the same"
    assert (error.retry_after_ms is not None) is (row.status == 429)


async def test_a_stream_that_fails_behind_its_first_token(faces: Faces) -> None:
    """What was delivered stays, and the end of the stream says why there is no more."""
    told = await faces.http.post("/tokenize", json={"prompt": "tx", "add_special_tokens": False})
    first = told.json()["tokens"][0]
    body = {"prompt": "a", "stream": True, "allowed_token_ids": [first], "guided_choice": ["tx"]}
    async with beside(faces, TABLE["generation"]):
        answer = await faces.http.post("/v1/completions", json=body)
        assert answer.status_code == 200
        *chunks, last, done = (line[6:] for line in answer.text.splitlines() if line)
        assert "".join(json.loads(one)["choices"][0]["text"] for one in chunks) == "t"
        error = json.loads(last)["error"]
        assert (error["code"], error["param"]) == ("generation_dead_end", "guided_choice")
        assert done == "[DONE]"
        sampling = {"allowed_token_ids": [first]}
        constraint = {"choice": {"values": ["tx"]}}
        options = {"sampling": sampling, "constraint": constraint}
        asked = text_pb2.GenerateStreamRequest(prompt={"text": "a"}, options=options)
        call = faces.text.GenerateStream(asked)
        assert (await call.read()).choice.text == "t"
        with pytest.raises(grpc.aio.AioRpcError, match="no token is left") as caught:
            await rest(call)
        assert caught.value.code() is Code.INVALID_ARGUMENT
        told = to_error(caught.value)
        assert (told.reason, told.param) == ("GENERATION_DEAD_END", "constraint.choice")


async def test_dead_ends_are_not_the_engines_fault(faces: Faces) -> None:
    """However many there are in a row, it is not ejected."""
    row = TABLE["generation"]
    body = {"prompt": "a", "max_tokens": 4, **row.http}
    answers = [await faces.http.post("/v1/completions", json=body) for _ in range(8)]
    assert {one.status_code for one in answers} == {400}
    (member,) = (await faces.http.get("/health")).json()["engines"]
    assert (member["state"], member["ejections"]) == ("ready", 0)

"""Services of different releases work together: what was once written down still holds.

An old client with a new server and the reverse, on both hops: a peer stands between two services of
today that passes on only what the contract of the last release, or of a coming one, knows.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from google.protobuf import descriptor_pb2
from grpc.aio import insecure_channel

from frontend.app import FrontendServer
from tests.golden.contract import (
    OURS,
    Contract,
    Frame,
    moved,
    of_tomorrow,
    plain,
    read_frames,
    stored,
)
from tests.golden.peer import Peer, peer
from tests.service.engine_fixtures import engine, pack, rest, unpack
from tests.service.frontends import frontend_for
from tests.waiting import PATIENCE_S
from tidemill.client import AsyncClient
from tidemill.runtime.errors import NotFound
from tidemill.sampling_params import SamplingParams
from tidemill.v1 import engine_pb2, text_pb2

DEMO = Path(__file__).parents[2] / "tidemill" / "builtin" / "demo"
CONTRACTS = {"golden": stored, "tomorrow": lambda: of_tomorrow(stored())}
SESSION = "/tidemill.v1.EngineService/Session"


def todays() -> Contract:
    """What the generated code of this checkout says."""
    files = descriptor_pb2.FileDescriptorSet()
    names = {one.name for one in files.file}
    todo = [engine_pb2.DESCRIPTOR, text_pb2.DESCRIPTOR]
    while todo:
        found = todo.pop(0)
        if found.name not in names:
            names.add(found.name)
            todo = [*found.dependencies, *todo]
            found.CopyToProto(files.file.add())
    ordered = sorted(files.file, key=lambda one: one.package == OURS.strip("."))
    return Contract(descriptor_pb2.FileDescriptorSet(file=ordered))


# ---------------------------------------------------------------- recorded bytes


def misread(frames: list[Frame], contract: Contract) -> list[str]:
    """Frames that say something else than they did, or hold what nobody knows any more."""
    found = []
    for one in frames:
        method = contract.methods.get(one.method)
        if method is None:
            found.append(f"{one.method} is gone")
            continue
        message = (method.asks if one.is_request else method.answers).FromString(one.content)
        size = message.ByteSize()
        message.DiscardUnknownFields()
        if plain(message) != one.says or message.ByteSize() != size:
            found.append(f"{one.method}: {message.DESCRIPTOR.name}")
    return found


def test_golden_bytes_are_read() -> None:
    assert misread(read_frames(), todays()) == []


def test_they_hold_a_session_and_the_text_service() -> None:
    frames = read_frames()
    kinds = {next(iter(one.says)) for one in frames if one.method == SESSION}
    assert kinds >= {
        "hello", "submit", "abort", "stop_matched", "ping", "hello_ack", "step", "failed", "pong",
        "draining", "load_report",
    }  # fmt: skip
    steps = [one.says["step"] for one in frames if "step" in one.says]
    assert {name for step in steps for name in step} >= {
        "handles", "counts", "token_ids", "logprobs", "finished", "canvas",
    }  # fmt: skip
    recorded = {one.method for one in frames if not one.is_request}
    told = {name for name in todays().methods if "/tidemill.v1.AdminService/" not in name}
    told.remove("/tidemill.v1.KvTransferService/Transfer")  # newer than the record
    told.remove("/tidemill.v1.TextService/Infill")  # of models that fill masks alone
    told.remove("/tidemill.v1.TextService/GetModel")  # recorded as what refuses
    assert recorded == told


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        ("tidemill.v1.Submit", "handle"),
        ("tidemill.v1.Step", "finished"),
        ("tidemill.v1.SamplingParams", "max_tokens"),
        ("tidemill.v1.WatchStateResponse", "state"),
        ("tidemill.v1.ChatRequest", "messages"),
    ],
)
def test_a_lost_field_is_noticed(kind: str, field: str) -> None:
    """Negative control."""
    lost = misread(read_frames(), Contract(moved(stored(), kind, field)))
    assert lost
    assert len(lost) < len(read_frames())


# ---------------------------------------------------------------- live peers


class Between(NamedTuple):
    """A frontend and an engine of today with peers before both."""

    frontend: FrontendServer
    engine_peer: Peer
    text_peer: Peer
    client: AsyncClient


@asynccontextmanager
async def between(contract: Contract) -> AsyncIterator[Between]:
    async with (
        engine(tokenizer=str(DEMO)) as server,
        peer(server.port, contract) as (port, first),
        frontend_for(port) as frontend,
        peer(frontend.grpc_port, contract) as (public, second),
        AsyncClient(f"127.0.0.1:{public}") as client,
    ):
        assert await frontend.desk.fleet.wait_ready(PATIENCE_S), frontend.desk.fleet.last_error
        yield Between(frontend, first, second, client)


@pytest.mark.parametrize("release", CONTRACTS)
async def test_text_in_and_out_through_peers_of_another_release(release: str) -> None:
    """The fake core counts up from the prompt's first token: abc... for a prompt that begins so."""
    async with between(Contract(CONTRACTS[release]())) as running:
        client = running.client
        answer = await client.generate("a", SamplingParams(max_tokens=4, n=2, logprobs=1))
        assert [choice.text for choice in answer.choices] == ["abcd", "abcd"]
        assert answer.usage.output_tokens == 8
        stop = SamplingParams(max_tokens=400, stop="fg")
        deltas = [delta async for delta in client.generate_stream("a", stop)]
        assert "".join(delta.text for delta in deltas) == "abcde"
        assert deltas[-2].choice.stop_reason == "fg"
        assert (await client.tokenize("ab")) == [97, 98]
        with pytest.raises(NotFound, match="other"):
            await client.get_model("other")
        leaving = client.generate_stream("a", SamplingParams(max_tokens=30_000))
        await anext(leaving)
        await leaving.aclose()
        # What a slow reader finds waiting comes as one: a greeting and its answer, four sequences
        # and a step of each call; two requests, text and usage of one, something of the other.
        assert running.engine_peer.counts[SESSION] >= 9
        assert running.text_peer.counts["/tidemill.v1.TextService/GenerateStream"] >= 5


async def test_a_peer_passes_on_only_what_it_knows() -> None:
    """Negative control: with a contract that puts a field elsewhere, it has no effect."""
    known = Contract(moved(stored(), "tidemill.v1.SamplingParams", "max_tokens"))
    async with between(known) as running:
        deltas = running.client.generate_stream("a", SamplingParams(max_tokens=1))
        text = ""
        async for delta in deltas:
            text += delta.text
            if len(text) > 3:
                break
        await deltas.aclose()
        assert text.startswith("abc")


@pytest.mark.parametrize("release", CONTRACTS)
async def test_a_client_of_another_release(release: str) -> None:
    """A session and a call by messages that are made from descriptors alone."""
    kinds = Contract(CONTRACTS[release]()).kinds
    extra: dict[str, Any] = {} if release == "golden" else {"of_tomorrow": "x"}
    frame, answer = kinds["tidemill.v1.SessionRequest"], kinds["tidemill.v1.SessionResponse"]
    spec = {"prompt_token_ids": pack(9), "sampling": {"max_tokens": 3, **extra}, **extra}
    async with engine() as server, insecure_channel(f"127.0.0.1:{server.port}") as channel:
        call = channel.stream_stream(
            SESSION,
            request_serializer=frame.SerializeToString,
            response_deserializer=answer.FromString,
        )()
        await call.write(frame(hello={"protocol_major": 1, **extra}, **extra))
        assert (await call.read()).hello_ack.model_id == "fake"
        await call.write(frame(submit={"handle": 5, "spec": spec}, **extra))
        await call.done_writing()
        steps = [one.step for one in await asyncio.wait_for(rest(call), PATIENCE_S)]
        assert [i for step in steps for i in unpack(step.token_ids)] == [9, 10, 11]
        assert steps[-1].finished[0].finish.usage.output_tokens == 3

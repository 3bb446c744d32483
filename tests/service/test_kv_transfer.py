"""A prefill and a decode engine with real rank processes: what a transfer does, and how it ends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from engine_service.server import transfer_out
from engine_service.server.launch import EngineServer
from engine_service.server.rank_process import RANK_MODULE
from engine_service.server.state import EngineState
from frontend.app import FrontendServer
from frontend.config import FrontendConfig
from tests.certificates import Authority
from tests.service.engine_fixtures import config, pack, rest, spec, stubs, unpack
from tests.service.test_engine_rank import MODEL, START_S
from tests.waiting import http_client, until
from tidemill.runtime.rpc import to_error
from tidemill.v1 import engine_pb2 as pb
from tidemill.v1 import engine_pb2_grpc as rpc

PAGE = 16
TEXT = "the quick brown fox jumps over the lazy dog and goes on to the next field, where it rests. "


async def start(
    folder: Path, role: str, rank_module: str = RANK_MODULE, **values: Any
) -> EngineServer:
    if not (folder / "config.json").exists():  # its time is part of the weight version
        (folder / "config.json").write_text(json.dumps(MODEL))
    chosen = {"model": str(folder), "load_format": "dummy", "seed": 3, **values}
    sizes = {"max_rows": 4, "page_size": PAGE, "num_pages": 200, "role": role}
    return await EngineServer.start(config(**{**sizes, **chosen}), rank_module=rank_module)


@asynccontextmanager
async def engines(folder: Path, *flags: dict[str, Any]) -> AsyncIterator[list[EngineServer]]:
    """One engine for each dict of flags; nothing is left of any request at the end."""
    async with AsyncExitStack() as stack:
        servers = []
        for values in flags:  # at the same time: most of it is imports
            servers.append(await start(folder, **values))
            stack.push_async_callback(servers[-1].stop)
        for one in servers:
            await until(lambda one=one: one.desk.board.state >= EngineState.READY, START_S)
            assert one.desk.board.state is EngineState.READY, one.desk.board.snapshot
        yield servers
        for one in servers:
            await until(lambda one=one: is_free(one) or one.desk.dead.is_set())
            assert one.desk.core.num_live == one.desk.fetches.num_held == 0


def is_free(server: EngineServer) -> bool:
    """Whether no request, transfer or page is held by anybody."""
    load, open_ = server.desk.core.load, moved(server, "kv_transfers_open")
    return load.running == load.waiting == load.pages_used == 0 and not any(open_.values())


def moved(server: EngineServer, name: str) -> dict[str, float]:
    """The values of a metric by their last label."""
    found = {}
    for family in server.desk.observer.metrics.registry.collect():
        if family.name == f"tidemill_{name}":
            for one in family.samples:
                if not one.name.endswith("_created"):
                    labels = {k: v for k, v in one.labels.items() if k != "model_name"}
                    label = labels.get("outcome") or labels.get("connector") or one.name
                    found[label] = found.get(label, 0) + one.value
    return found


def address(server: EngineServer) -> str:
    return f"127.0.0.1:{server.port}"


def asking(prompt: list[int], source: str = "", **fields: Any) -> pb.GenerateRequest:
    asked = spec(*prompt, max_tokens=8, **fields)
    asked.sampling.temperature, asked.stop.ignore_eos = 0.0, True
    if source:
        asked.kv_source.address = source
    return pb.GenerateRequest(spec=asked)


async def answer(stub: Any, request: pb.GenerateRequest) -> tuple[list[int], int]:
    """Tokens, and how many of the prompt's came out of the cache."""
    tokens, cached = [], -1
    for one in await rest(stub.Generate(request)):
        tokens += unpack(one.token_ids)
        if one.HasField("finish"):
            cached = one.finish.usage.cached_tokens
    return tokens, cached


@contextmanager
def patience(server: EngineServer, seconds: float) -> Iterator[None]:
    """Requests that come meanwhile wait so long for KV; all others wait for as long as it takes."""
    held = server.desk.fetches
    before, held._config = held._config, replace(held._config, kv_transfer_timeout_s=seconds)
    try:
        yield
    finally:
        held._config = before


def signal_rank(server: EngineServer, number: int) -> None:
    os.kill(server._rank._process.pid, number)


async def test_transfers_and_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_out, "PIECE_BYTES", 1)  # a page each, more than may be on the way
    async with (
        engines(tmp_path, {"role": "prefill"}, {"role": "decode"}) as (source, target),
        stubs(source) as there,
        stubs(target) as here,
    ):
        prompt = [3 + i % 500 for i in range(20 * PAGE + 5)]
        right, cached = await answer(here, asking(prompt, cache_salt="alone"))
        assert cached == 0
        for connector, host in (("shm", target.desk.fetches._host), ("grpc", "")):
            target.desk.fetches._host = host
            request = asking(prompt, address(source), cache_salt=connector)
            assert await answer(here, request) == (right, 20 * PAGE)
            for one in (source, target):
                await until(lambda one=one: is_free(one))
                size = 20 * PAGE * 2 * 2 * 16 * 4  # layers, keys and values, head size, float32
                assert moved(one, "kv_transfer_bytes")[connector] == size
        assert moved(source, "kv_transfers") == moved(target, "kv_transfers") == {"done": 2}
        await check_shared_fetch(here, prompt, right, source, target)
        await check_waits(here, prompt, right, source, target)
        await check_stalls(here, prompt, right, source, target)
        await check_refused(there, here, source, target)


async def check_shared_fetch(
    here: Any, prompt: list[int], right: list[int], source: EngineServer, target: EngineServer
) -> None:
    """Sequences of one prompt share a fetch; what is there is not fetched again."""
    before = moved(target, "kv_transfers")["done"]
    request = asking(prompt, address(source), cache_salt="two")
    request.n = 2
    by_index: dict[int, list[int]] = {0: [], 1: []}
    for one in await rest(here.Generate(request)):
        by_index[one.index] += unpack(one.token_ids)
    assert by_index == {0: right, 1: right}
    request.n = 1
    assert (await answer(here, request))[0] == right
    assert moved(target, "kv_transfers")["done"] == before + 1


async def check_waits(
    here: Any, prompt: list[int], right: list[int], source: EngineServer, target: EngineServer
) -> None:
    """A prefill engine that stands still: requests that are aborted, whose deadline passes, and
    that wait no longer; nothing is held afterwards on either side."""
    finished, held = target.desk.core.finished, target.desk.fetches
    signal_rank(source, signal.SIGSTOP)
    try:
        call = here.Generate(asking(prompt, address(source), cache_salt="aborted"))
        await until(lambda: held.num_held == 1 and any(moved(source, "kv_transfers_open").values()))
        assert target.desk.load.waiting == 1
        call.cancel()
        await until(lambda: held.num_held == target.desk.core.num_live == 0)
        await until(lambda: is_free(target) and not source.desk.core.num_live)
        late = asking(prompt, address(source), cache_salt="late", timeout_ms=100)
        assert (await answer(here, late))[0] == []
        assert {reason.name: n for reason, n in finished.items()}["DEADLINE"] == 1
        waited = asking(prompt, address(source), cache_salt="waited")
        began = asyncio.get_running_loop().time()
        with patience(target, 2.0):
            assert await answer(here, waited) == (right, 0)
        assert asyncio.get_running_loop().time() - began >= 1.9
    finally:
        signal_rank(source, signal.SIGCONT)
    await until(lambda: is_free(source) and is_free(target))


async def check_stalls(
    here: Any, prompt: list[int], right: list[int], source: EngineServer, target: EngineServer
) -> None:
    """A prefill engine that stands still in the middle: who is aborted leaves nothing, and who is
    not goes on from the pages that have come."""
    counts = target.desk.observer.metrics.transfers
    count, seen = counts.moved, []

    def stall(model: str, direction: str, piece: Any) -> None:
        count(model, direction, piece)
        if direction == "received":
            seen.append(piece)
            if len(seen) == 3:
                signal_rank(source, signal.SIGSTOP)

    counts.moved = stall  # type: ignore[method-assign]
    try:
        call = here.Generate(asking(prompt, address(source), cache_salt="cut"))
        await until(lambda: len(seen) >= 3)
        call.cancel()
        await until(lambda: is_free(target) and target.desk.fetches.num_held == 0)
        signal_rank(source, signal.SIGCONT)
        await until(lambda: is_free(source))
        seen.clear()
        stalled = asking(prompt, address(source), cache_salt="stalled")
        with patience(target, 6.0):  # for three pieces to come, and then no more
            tokens, cached = await answer(here, stalled)
        assert tokens == right
        assert cached == len(seen) * PAGE
        assert 3 <= len(seen) < 20
    finally:
        counts.moved = count  # type: ignore[method-assign]
        signal_rank(source, signal.SIGCONT)
    await until(lambda: is_free(source) and is_free(target))


async def check_refused(there: Any, here: Any, source: EngineServer, target: EngineServer) -> None:
    async def refusal(call: Any) -> tuple[str, str]:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rest(call)
        error = to_error(caught.value)
        return error.reason, error.message

    reason, text = await refusal(there.Generate(asking([5, 6])))
    assert (reason, "--role decode or both" in text) == ("PREFILL_ONLY", True)
    layout = pb.KvLayout(**(target.desk.facts.kv_layout or source.desk.facts.kv_layout)._asdict())
    opened = pb.TransferOpen(prompt_token_ids=pack(*range(3, 3 + PAGE)), layout=layout)
    for server, change, words in (
        (target, {}, ("WRONG_ROLE", "fetched from engines of --role prefill")),
        (source, {"page_size": 64}, ("KV_LAYOUT", "page_size is 16 here and 64 in")),
        (source, {"dtype": "bfloat16"}, ("KV_LAYOUT", "dtype is 'float32' here and 'bfloat16'")),
        (source, {"weight_version": "x"}, ("KV_LAYOUT", "and 'x' in the engine that asks")),
    ):
        async with grpc.aio.insecure_channel(address(server)) as channel:
            call = rpc.KvTransferServiceStub(channel).Transfer()
            asked = pb.TransferRequest(open=opened)
            for name, value in change.items():
                setattr(asked.open.layout, name, value)
            await call.write(asked)
            reason, text = await refusal(call)
            assert (reason, words[1] in text) == (words[0], True), text
    async with grpc.aio.insecure_channel(address(source)) as channel:
        call = rpc.KvTransferServiceStub(channel).Transfer()
        await call.write(pb.TransferRequest(taken=pb.PieceTaken()))
        assert "first frame" in (await refusal(call))[1]


async def test_engines_that_do_not_fit_are_told_and_cost_no_token(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An engine of another page size, asked over TLS, one that fetches itself, and none at all."""
    authority = Authority(tmp_path / "tls", "ca")
    cert, key = authority.sign("engine")
    flags = [
        {"role": "prefill", "page_size": 2 * PAGE, "tls_cert": cert, "tls_key": key},
        {"role": "decode", "kv_tls_ca": authority.path},
    ]
    async with engines(tmp_path, *flags) as (source, target), stubs(target) as here:
        prompt = [3 + i for i in range(3 * PAGE)]
        right = (await answer(here, asking(prompt, cache_salt="alone")))[0]
        for number, where in enumerate((address(source), address(target), "127.0.0.1:9", "odd:")):
            request = asking(prompt, where, cache_salt=str(number))
            assert await answer(here, request) == (right, 0), where
        assert moved(target, "kv_transfers") == {"failed": 4}
        assert "page_size is 32 here and 16 in the engine that asks" in caplog.text


@pytest.mark.parametrize("model", ["demo", "demo-block"])
async def test_a_frontend_splits_requests(tmp_path: Path, model: str) -> None:
    """Prompts go by the prefill engine, answers are those of one engine; and when the prefill
    engine is killed, the other one goes on alone."""
    flags = {"model": model, "load_format": "auto", "num_pages": 600}
    pair = [{"role": role, **flags} for role in ("prefill", "decode")]
    async with engines(tmp_path, *pair) as (source, target):
        asked = FrontendConfig(
            engine=f"{address(source)},{address(target)}", http_port=0, grpc_port=0
        )
        frontend = await FrontendServer.start(asked)
        try:
            await until(lambda: frontend.desk.fleet.num_open == 2)
            async with http_client(f"http://127.0.0.1:{frontend.http_port}") as http:
                split = await asyncio.gather(*(complete(http, i, "split") for i in range(8)))
                done = moved(target, "kv_transfers")["done"]
                assert done >= 6, "short prompts need no transfer, all others do"
                told = {one["role"]: one for one in (await http.get("/health")).json()["engines"]}
                assert told["prefill"]["requests_routed"] == 8
                assert sum(any(usage) for _, _, usage in split) == done
                signal_rank(source, signal.SIGKILL)
                await until(lambda: frontend.desk.fleet.num_open == 1)
                alone = await asyncio.gather(*(complete(http, i, "alone") for i in range(8)))
        finally:
            await frontend.stop()
        for (text, scores, _), (same, others, cached) in zip(split, alone, strict=True):
            assert text == same
            assert scores == pytest.approx(others, abs=1e-4)
            assert cached == [0]
        assert moved(target, "kv_transfers")["done"] == done


async def complete(http: Any, number: int, salt: str) -> tuple[str, list[float], list[int]]:
    """Text, log-probabilities and cached tokens of one of several requests."""
    body = {
        "prompt": f"{number} " + TEXT[: 3 + 23 * number % 80] * (1 + number % 3),
        "max_tokens": 24,
        "seed": number,
        "temperature": (0.0, 0.8)[number % 2],
        "logprobs": 1,
        "ignore_eos": True,
        "cache_salt": f"{salt}{number}",
    }
    given = await http.post("/v1/completions", json=body)
    assert given.status_code == 200, given.text
    told = given.json()
    choice, details = told["choices"][0], told["usage"].get("prompt_tokens_details") or {}
    return choice["text"], choice["logprobs"]["token_logprobs"], [details.get("cached_tokens", 0)]

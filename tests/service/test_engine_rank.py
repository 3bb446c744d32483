"""The engine server with the real rank process: real core loop, simulated or tiny real model."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio

from engine_service.core.messages import FinishReason
from engine_service.server.launch import EngineServer
from engine_service.server.rank_process import RANK_MODULE
from engine_service.server.state import EngineState
from engine_service.simulated import SimulatedExecutor, first_token_seed
from tests.otlp import collecting
from tests.service.engine_fixtures import (
    config,
    pack,
    rest,
    session,
    spec,
    stubs,
    unpack,
    until_late,
)
from tests.unit.test_telemetry import HEADER
from tests.waiting import PATIENCE_S, until
from tidemill.runtime.rpc import to_error
from tidemill.v1 import engine_pb2 as pb

pytestmark = pytest.mark.asyncio(loop_scope="module")

VOCAB = 512
START_S = 2 * PATIENCE_S
MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": VOCAB,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "hidden_act": "silu",
    "eos_token_id": 2,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}


@asynccontextmanager
async def real_engine(
    folder: Path, *, config_json: dict[str, Any] = MODEL, **values: Any
) -> AsyncIterator[EngineServer]:
    (folder / "config.json").write_text(json.dumps(config_json))
    chosen = {"model": str(folder), "max_rows": 4, "load_format": "dummy", **values}
    server = await EngineServer.start(config(**chosen), rank_module=RANK_MODULE)
    try:
        await until(lambda: server.desk.board.state >= EngineState.READY, START_S)
        assert server.desk.board.state is EngineState.READY, server.desk.board.snapshot
        yield server
    finally:
        await server.stop()
    assert server.desk.core.num_live == 0


def expected(prompt: list[int], count: int, choice: int = 0) -> list[int]:
    executor = SimulatedExecutor(None, vocab_size=VOCAB, step_s=0, never=frozenset({2}))
    seed = first_token_seed(pack(*prompt), choice)
    return [executor.token(seed, len(prompt) + i) for i in range(count)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def simulated(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EngineServer]:
    flags = {"executor": "simulated", "simulated_step_ms": 10}
    async with real_engine(tmp_path_factory.mktemp("simulated"), **flags) as server:
        yield server


async def test_simulated_tokens_and_nothing_leaks(simulated: EngineServer) -> None:
    async with stubs(simulated) as stub, session(stub) as client:
        core = simulated.desk.core
        aborted = core.finished[FinishReason.ABORTED]
        for handle in range(12):
            await client.submit(handle, 10 + handle, 3, 4, max_tokens=30)
        await client.drain(*range(12))
        for handle in range(12):
            assert client.tokens[handle] == expected([10 + handle, 3, 4], 30)
        call = stub.Generate(pb.GenerateRequest(spec=spec(7, 7, max_tokens=5), n=2))
        by_index: dict[int, list[int]] = {0: [], 1: []}
        for answer in await rest(call):
            by_index[answer.index] += unpack(answer.token_ids)
        assert by_index == {i: expected([7, 7], 5, i) for i in range(2)}
        await client.submit(100, *range(3, 500), max_tokens=1500)
        await client.first_token(100)
        assert core.load.pages_used > 0
        client.call.cancel()
        await until(lambda: core.num_live == 0)
        await until(lambda: core.load.running == core.load.pages_used == 0)
        assert core.finished[FinishReason.ABORTED] == aborted + 1


async def test_refusals_of_the_core(simulated: EngineServer) -> None:
    async with stubs(simulated) as stub:
        odd = {
            "prompt_token_ids": [spec(), spec(VOCAB), spec(*[3] * 3000)],
            "temperature": [spec(1)],
            "top_p": [spec(1)],
            "max_tokens": [spec(1, max_tokens=-1), spec(1, max_tokens=0)],
            "decoding.params": [],
        }
        odd["temperature"][0].sampling.temperature = float("nan")
        odd["top_p"][0].sampling.top_p = 0
        for param, specs in odd.items():
            for one in specs:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await rest(stub.Generate(pb.GenerateRequest(spec=one)))
                error = to_error(caught.value)
                assert (error.grpc_code, error.param) == (3, param), error.message
        unknown = spec(1)
        unknown.decoding.params.update({"remsking": "x"})
        with pytest.raises(grpc.aio.AioRpcError, match="remsking"):
            await rest(stub.Generate(pb.GenerateRequest(spec=unknown)))
        request = pb.GenerateRequest(spec=spec(1, max_tokens=500))
        await until_late(simulated, lambda seconds: stub.Generate(request, timeout=seconds))
        await until(lambda: simulated.desk.core.load.pages_used == 0)


async def test_traces_have_one_id_and_the_right_parents(tmp_path: Path) -> None:
    slow = {"executor": "simulated", "simulated_step_ms": 20}
    with collecting() as (collector, endpoint):
        async with (
            real_engine(tmp_path, **slow, otlp_endpoint=endpoint) as server,
            stubs(server) as stub,
            session(stub) as client,
        ):
            await client.submit(1, 5, max_tokens=3, traceparent=HEADER, request_id="done")
            await client.submit(2, 5, max_tokens=2000, traceparent=HEADER, request_id="gone")
            await client.submit(3, max_tokens=3, traceparent=HEADER, request_id="refused")
            await client.submit(4, 5, max_tokens=3, traceparent=HEADER[:-1] + "0")
            await client.drain(1, 3, 4)
            client.call.cancel()
            await until(lambda: server.desk.core.num_live == 0)
        spans = collector.spans
    assert {span.trace_id.hex() for span in spans} == {HEADER[3:35]}
    roots = {
        next(a.value.string_value for a in span.attributes if a.key == "tidemill.request_id"): span
        for span in spans
        if span.name == "tidemill.v1.EngineService/Generate"
    }
    assert set(roots) == {"done", "gone", "refused"}
    assert {root.parent_span_id.hex() for root in roots.values()} == {HEADER[36:52]}
    assert roots["gone"].status.message == "aborted"
    assert "empty" in roots["refused"].status.message
    for name in ("done", "gone"):
        root = roots[name]
        parts = [span for span in spans if span.parent_span_id == root.span_id]
        assert {part.name for part in parts} == {
            "engine.queue",
            "engine.prefill",
            "engine.decode",
        }
        parts.sort(key=lambda part: part.start_time_unix_nano)
        for before, after in pairwise(parts):
            assert before.end_time_unix_nano <= after.start_time_unix_nano + 1_000_000
    keys = {attribute.key for attribute in roots["done"].attributes}
    assert {"gen_ai.usage.output_tokens", "tidemill.tokens_per_forward"} <= keys


async def test_a_preemption_shows_in_its_trace(tmp_path: Path) -> None:
    """Two requests of 13 pages each in a pool of 16: the later one waits for the earlier one."""
    small = {"executor": "simulated", "simulated_step_ms": 0.5, "num_pages": 16, "page_size": 16}
    with collecting() as (collector, endpoint):
        async with (
            real_engine(tmp_path, **small, otlp_endpoint=endpoint) as server,
            stubs(server) as stub,
        ):
            # Both in one call: of two, the first could be over before the second arrives.
            asked = spec(5, max_tokens=200, traceparent=HEADER)
            answers = await rest(stub.Generate(pb.GenerateRequest(spec=asked, n=2)))
            ends = {one.index: one.finish for one in answers if one.HasField("finish")}
            pauses = [ends[index].usage.preemptions for index in (0, 1)]
    assert pauses[0] == 0 < pauses[1]
    spans = {span.span_id: span for span in collector.spans}
    waits = [span for span in spans.values() if span.name == "engine.preempted"]
    assert len(waits) == pauses[1]
    for wait in waits:
        root = spans[wait.parent_span_id]
        assert root.start_time_unix_nano < wait.start_time_unix_nano
        assert wait.start_time_unix_nano < wait.end_time_unix_nano <= root.end_time_unix_nano


async def test_a_diffusion_request_shows_its_blocks(tmp_path: Path) -> None:
    built_in = {"model": "demo-block", "load_format": "auto", "max_model_len": 64}
    with collecting() as (collector, endpoint):
        async with (
            real_engine(tmp_path, **built_in, otlp_endpoint=endpoint) as server,
            stubs(server) as stub,
            session(stub) as client,
        ):
            stop = pb.StopSpec(ignore_eos=True)
            await client.submit(1, 65, max_tokens=40, stop=stop, traceparent=HEADER)
            given = [{"position": p, "token_id": 65} for p in (*range(1, 21), *range(30, 41))]
            asked = {"max_tokens": 40, "stop": stop, "traceparent": HEADER}
            await client.submit(2, 65, pinned=given, request_id="gap", **asked)
            await client.drain(1, 2)
    assert "engine.denoise" in {span.name for span in collector.spans}
    roots = [span for span in collector.spans if span.name.endswith("/Generate")]
    values = [{a.key: a.value for a in root.attributes} for root in roots]
    gap, whole = sorted(values, key=lambda of: of["tidemill.request_id"].string_value != "gap")
    assert whole["tidemill.blocks"].int_value == 3
    assert whole["tidemill.denoise_steps"].int_value >= 3
    # Positions 21 to 29 are generated: the second block of 16, behind one that is all given.
    assert gap["gen_ai.usage.output_tokens"].int_value == 9
    assert gap["tidemill.blocks"].int_value == 2


async def test_a_tiny_real_model_and_its_death(tmp_path: Path) -> None:
    async with (
        real_engine(tmp_path, max_model_len=2048, num_pages=256) as server,
        stubs(server) as stub,
        session(stub) as client,
    ):
        asked: dict[str, Any] = {"max_tokens": 8, "stop": pb.StopSpec(ignore_eos=True)}
        for handle in range(3):
            await client.submit(handle, 5, 6, 7, logprobs=pb.LogprobsSpec(top=2), **asked)
        await client.drain(0, 1, 2)
        assert {len(tokens) for tokens in client.tokens.values()} == {8}
        logged = [row for frame in client.frames for row in frame.step.logprobs]
        assert all(len(entry.token_ids) == 3 for row in logged for entry in row.positions)
        await client.submit(9, 5, max_tokens=2000, stop=pb.StopSpec(ignore_eos=True))
        await client.first_token(9)
        os.kill(server._rank.pid, signal.SIGKILL)
        await client.drain(9)
        assert client.ends[9][0].reason == "ENGINE_DEAD"
        await asyncio.wait_for(server.desk.dead.wait(), PATIENCE_S)


async def test_a_missing_model_says_what_to_do(tmp_path: Path) -> None:
    server = await EngineServer.start(config(model=str(tmp_path)), rank_module=RANK_MODULE)
    try:
        await until(lambda: server.desk.board.state is EngineState.ERROR, START_S)
        assert "config.json" in server.desk.board.snapshot.detail
    finally:
        await server.stop()


async def test_a_missing_torch_is_named_with_the_extra(tmp_path: Path) -> None:
    module = "tests.service.rank_without_torch"
    server = await EngineServer.start(config(model="demo"), rank_module=module)
    try:
        await until(lambda: server.desk.board.state is EngineState.ERROR, START_S)
        detail = server.desk.board.snapshot.detail
        assert "torch is not installed: pip install 'tidemill[engine]'" in detail
    finally:
        await server.stop()

"""Generate, Abort and the other services over real gRPC."""

from __future__ import annotations

import asyncio
import time

import grpc
import pytest

from engine_service.core.messages import FinishReason
from tests.service.engine_fixtures import (
    engine,
    info,
    pack,
    rest,
    session,
    spec,
    stubs,
    unpack,
    until_late,
)
from tests.waiting import PATIENCE_S, until
from tidemill.runtime.rpc import to_error
from tidemill.v1 import engine_pb2 as pb
from tidemill.v1 import engine_pb2_grpc


async def collect(call: object) -> dict[int, list[int]]:
    tokens: dict[int, list[int]] = {}
    for answer in await rest(call):
        tokens.setdefault(answer.index, []).extend(unpack(answer.token_ids))
    return tokens


async def test_choices_are_tagged_by_index() -> None:
    async with engine() as server, stubs(server) as stub:
        request = pb.GenerateRequest(spec=spec(40, max_tokens=4), n=3)
        assert await collect(stub.Generate(request)) == {i: [40, 41, 42, 43] for i in range(3)}
        assert server.desk.core.finished == {FinishReason.LENGTH: 3}


@pytest.mark.parametrize(
    ("request_", "code", "said"),
    [
        (pb.GenerateRequest(spec=spec(1), n=0), "INVALID_ARGUMENT", "n is 0"),
        (pb.GenerateRequest(spec=spec()), "INVALID_ARGUMENT", "empty"),
        (pb.GenerateRequest(spec=spec(1, media=[pb.MediaItem()])), "UNIMPLEMENTED", "media"),
        (pb.GenerateRequest(spec=spec(1, dp_rank=2)), "UNIMPLEMENTED", "dp_rank"),
        (pb.GenerateRequest(), "INVALID_ARGUMENT", "empty"),
    ],
)
async def test_refusals(request_: pb.GenerateRequest, code: str, said: str) -> None:
    async with engine() as server, stubs(server) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(stub.Generate(request_))
        assert caught.value.code().name == code
        assert said in caught.value.details()
        assert to_error(caught.value).reason


async def test_overload_carries_retry_info() -> None:
    async with engine() as server, stubs(server) as stub:
        request = pb.GenerateRequest(spec=spec(1, max_tokens=300), n=7)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(stub.Generate(request))
        assert to_error(caught.value).retry_after_ms == 500
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await until(lambda: server.desk.core.num_live == 0)


@pytest.mark.parametrize("prompt", [(5,), (5,) * 1000])
async def test_cancel_aborts_in_decode_and_prefill(prompt: tuple[int, ...]) -> None:
    async with engine() as server, stubs(server) as stub:
        call = stub.Generate(pb.GenerateRequest(spec=spec(*prompt, max_tokens=30_000)))
        await until(lambda: server.desk.core.num_live == 1)
        if len(prompt) == 1:
            await call.read()
        call.cancel()
        await until(lambda: server.desk.core.finished[FinishReason.ABORTED] == 1)
        assert server.desk.core.num_live == 0


async def test_deadline_of_a_call_is_counted_and_leaks_nothing() -> None:
    async with engine(simulated_step_ms=20) as server, stubs(server) as stub:
        request = pb.GenerateRequest(spec=spec(1, max_tokens=30_000))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(stub.Generate(request, timeout=0.001))
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until_late(server, lambda seconds: stub.Generate(request, timeout=seconds))
        assert server.desk.core.num_live == 0


async def test_timeout_in_the_spec_finishes_with_what_there_is() -> None:
    async with engine() as server, stubs(server) as stub:
        num_tokens, timeout_ms = 0, 100
        while not num_tokens:  # a slow machine needs more time for the first one
            assert timeout_ms < 1000 * PATIENCE_S
            asked = spec(8, max_tokens=30_000, timeout_ms=timeout_ms)
            answers = await rest(stub.Generate(pb.GenerateRequest(spec=asked)))
            assert answers[-1].finish.reason == pb.FINISH_REASON_DEADLINE
            num_tokens = sum(len(one.token_ids) for one in answers)
            timeout_ms *= 4


async def test_abort_is_idempotent_and_names_each_outcome() -> None:
    async with engine() as server, stubs(server) as stub:
        asked = spec(1, max_tokens=30_000, request_id="mine")
        call = stub.Generate(pb.GenerateRequest(spec=asked, n=2))
        await call.read()
        request = pb.AbortRequest(request_ids=["mine", "other"])
        first = await stub.Abort(request)
        assert dict(first.outcomes) == {
            "mine": pb.ABORT_OUTCOME_ABORTED,
            "other": pb.ABORT_OUTCOME_UNKNOWN,
        }
        ends = [one.finish.reason for one in await rest(call) if one.HasField("finish")]
        assert ends == [pb.FINISH_REASON_ABORTED] * 2
        again = await stub.Abort(request)
        assert again.outcomes["mine"] == pb.ABORT_OUTCOME_ALREADY_DONE


async def test_abort_of_a_whole_session() -> None:
    async with engine() as server, stubs(server) as stub, session(stub) as client:
        await client.submit(1, 1, max_tokens=30_000, request_id="a")
        await client.submit(2, 1, max_tokens=30_000, request_id="b")
        await client.first_token(2)
        name = dict(await client.call.initial_metadata())["tidemill-session"]
        answer = await stub.Abort(pb.AbortRequest(all_of_session=name))
        assert dict(answer.outcomes) == dict.fromkeys("ab", pb.ABORT_OUTCOME_ABORTED)
        await client.drain(1, 2)
        assert {end.reason for ends in client.ends.values() for end in ends} == {5}


async def test_logprobs_and_canvas_arrive() -> None:
    async with engine() as server, stubs(server) as stub:
        asked = spec(9, max_tokens=2, emit_canvas=True, logprobs=pb.LogprobsSpec(top=0))
        answers = await rest(stub.Generate(pb.GenerateRequest(spec=asked)))
        entries = [entry for one in answers for entry in one.logprobs]
        assert [entry.token_ids[0] for entry in entries] == [9, 10]
        assert (answers[0].canvas.block_start, answers[0].canvas.block) == (7, 2)
        assert unpack(answers[0].canvas.token_ids) == [1, 2]
        assert answers[0].canvas.fixed == b"\x01\x00"
        assert list(answers[0].canvas.confidence) == [0.75, 0.5]


async def test_large_prompt_within_the_limit_and_one_beyond_it() -> None:
    async with engine(max_message_bytes=8 << 20) as server, stubs(server) as stub:
        big = pb.GenerateRequest(spec=spec(max_tokens=1))
        big.spec.prompt_token_ids = pack(1) * 1_500_000
        call = stub.Generate(big)
        await until(lambda: server.desk.core.num_live == 1)
        call.cancel()
        big.spec.prompt_token_ids = pack(1) * 2_500_000
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(stub.Generate(big))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "8388608" in caught.value.details()


async def test_malformed_bytes_end_only_their_own_call() -> None:
    async with engine() as server, stubs(server) as stub:
        address = f"127.0.0.1:{server.port}"
        good = stub.Generate(pb.GenerateRequest(spec=spec(3, max_tokens=200)))
        begun = len(unpack((await good.read()).token_ids))
        async with grpc.aio.insecure_channel(address) as channel:
            odd = channel.unary_stream("/tidemill.v1.EngineService/Generate")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await odd(b"\xff\xff\xff").read()
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            stream = channel.stream_stream("/tidemill.v1.EngineService/Session")()
            await stream.write(b"\xff\xff\xff")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await asyncio.wait_for(stream.read(), PATIENCE_S)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert begun + len((await collect(good)).get(0, [])) == 200


async def test_every_rpc_has_a_servicer_and_unserved_ones_are_named() -> None:
    async with engine() as server:
        kinds = pb.DESCRIPTOR.services_by_name.values()
        served = {
            "Session",
            "Generate",
            "Pool",
            "Abort",
            "GetEngineInfo",
            "GetTokenizer",
            "WatchState",
            "Subscribe",
            "Transfer",
        }
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            for service in kinds:
                stub = getattr(engine_pb2_grpc, f"{service.name}Stub")(channel)
                for method in service.methods:
                    if method.name in served:
                        continue
                    asked = getattr(pb, method.input_type.name)()
                    call = getattr(stub, method.name)(asked)
                    with pytest.raises(grpc.aio.AioRpcError) as caught:
                        await (call.read() if method.server_streaming else call)
                    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
                    # Operators have a port of their own; on this one nobody knows the service.
                    assert service.name == "AdminService"


async def test_engine_info_and_missing_tokenizer() -> None:
    async with engine() as server, info(server) as stub:
        facts = await stub.GetEngineInfo(pb.GetEngineInfoRequest())
        assert (facts.model_id, facts.limits.vocab_size) == ("fake", 100_000)
        assert facts.default_sampling.temperature == 1.0
        assert not facts.default_sampling.HasField("top_p")
        assert facts.decoding.default_params["threshold"] == 0.9
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetTokenizer(pb.GetTokenizerRequest()).read()
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        assert "--tokenizer" in caught.value.details()


async def test_tokenizer_comes_in_chunks(tmp_path: object) -> None:
    content = {"tokenizer.json": b"x" * 600_000, "tokenizer_config.json": b"{}"}
    for name, text in content.items():
        (tmp_path / name).write_bytes(text)
    async with engine(tokenizer=str(tmp_path)) as server, info(server) as stub:
        got: dict[str, bytes] = {}
        for part in await rest(stub.GetTokenizer(pb.GetTokenizerRequest())):
            if part.HasField("manifest"):
                files = list(part.manifest.files)
            else:
                name = files[part.chunk.file].name
                assert len(part.chunk.content) <= 256 << 10
                got[name] = got.get(name, b"") + part.chunk.content
        assert got == content
        assert [file.size for file in files] == [600_000, 2]


SILENCE_S = 4.0
PINGS = [("grpc.keepalive_time_ms", 1000), ("grpc.http2.max_pings_without_data", 0)]


async def test_pings_on_a_silent_generate_do_not_kill_the_connection() -> None:
    """A ping a second, and no message from the server before the only one. tests/slow/test_silence
    keeps silent for a minute."""
    async with engine(simulated_step_ms=20) as server:
        address = f"127.0.0.1:{server.port}"
        async with grpc.aio.insecure_channel(address, PINGS) as channel:
            stub = engine_pb2_grpc.EngineServiceStub(channel)
            began = time.monotonic()
            silent = spec(*([3] * round(SILENCE_S / 0.02)), max_tokens=1)
            answers = await rest(stub.Generate(pb.GenerateRequest(spec=silent)))
            assert time.monotonic() - began >= SILENCE_S
            assert unpack(answers[-1].token_ids) == [3]


async def test_control_pings_do_kill_the_connection_of_a_server_with_defaults() -> None:
    async def silent(request: bytes, context: object) -> bytes:
        await asyncio.sleep(2 * PATIENCE_S)
        return request

    method = grpc.unary_unary_rpc_method_handler(silent)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("test.Silent", {"Wait": method}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", PINGS) as channel:
            call = channel.unary_unary("/test.Silent/Wait")(b"")
            assert await call.code() is grpc.StatusCode.UNAVAILABLE
            assert "pings" in await call.details()
    finally:
        await server.stop(None)

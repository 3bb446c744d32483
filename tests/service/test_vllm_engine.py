"""vllm.grpc.engine.VllmEngine over real gRPC, by the stubs of its own wheel."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2, vllm_engine_pb2_grpc

from engine_service.core.messages import FinishReason
from engine_service.server.launch import EngineServer
from engine_service.server.state import EngineState
from tests.service.engine_fixtures import engine, rest
from tests.service.test_engine_lifecycle import SERVING, until_health
from tests.waiting import until
from tidemill.runtime.rpc import to_error

pb: Any = vllm_engine_pb2
DEMO = Path(__file__).parents[2] / "tidemill" / "builtin" / "demo"


@asynccontextmanager
async def facade(server: EngineServer) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        yield vllm_engine_pb2_grpc.VllmEngineStub(channel)


def asked(*prompt: int, stream: bool = True, request_id: str = "", **sampling: Any) -> Any:
    return pb.GenerateRequest(
        request_id=request_id,
        tokenized=pb.TokenizedInput(input_ids=prompt),
        sampling_params=pb.SamplingParams(**{"max_tokens": 5, **sampling}),
        stream=stream,
    )


async def test_streamed_outputs_are_pieces_and_an_end_each() -> None:
    async with engine(vllm_facade=True) as server, facade(server) as stub:
        answers = await rest(stub.Generate(asked(40, 7, n=2, logprobs=0)))
        for index in range(2):
            mine = [a.chunk for a in answers if a.HasField("chunk") and a.chunk.index == index]
            assert [i for chunk in mine for i in chunk.token_ids] == [40, 41, 42, 43, 44]
            assert all(chunk.completion_tokens == len(chunk.token_ids) for chunk in mine)
            assert all(chunk.prompt_tokens == 2 for chunk in mine)
            scored = [i for chunk in mine for i in chunk.output_logprobs.token_ids]
            assert scored == [40, 41, 42, 43, 44]
            ends = [a.complete for a in answers if a.HasField("complete")]
            (end,) = [one for one in ends if one.index == index]
            assert (end.finish_reason, end.completion_tokens, end.prompt_tokens) == ("length", 5, 2)
            assert not end.output_ids


async def test_a_whole_answer_has_everything_in_its_one_message() -> None:
    async with engine(vllm_facade=True) as server, facade(server) as stub:
        (answer,) = await rest(stub.Generate(asked(40, stream=False, logprobs=1)))
        end = answer.complete
        assert list(end.output_ids) == [40, 41, 42, 43, 44]
        assert list(end.output_logprobs.token_ids) == [40, 41, 42, 43, 44]
        assert list(end.output_logprobs.token_logprobs) == [-0.5] * 5


@pytest.mark.parametrize("stream", [True, False])
async def test_stop_strings_end_the_output_behind_their_last_token(stream: bool) -> None:
    """Ids of the fake core count up: 97.. is the alphabet to the demo's tokenizer."""
    async with engine(vllm_facade=True, tokenizer=str(DEMO)) as server, facade(server) as stub:
        request = asked(97, stream=stream, stop=["zz", "de"], max_tokens=30_000)
        answers = await rest(stub.Generate(request))
        end = answers[-1].complete
        pieces = [i for a in answers for i in a.chunk.token_ids] or end.output_ids
        assert bytes(pieces) == b"abcde"
        assert (end.finish_reason, end.matched_stop_str) == ("stop", "de")
        assert end.completion_tokens == 5
        assert server.desk.core.finished == {FinishReason.STOP_STRING: 1}


async def test_min_tokens_hold_stop_strings_back() -> None:
    async with engine(vllm_facade=True, tokenizer=str(DEMO)) as server, facade(server) as stub:
        request = asked(97, stop=["b", "g"], min_tokens=3, max_tokens=30_000, stream=False)
        (answer,) = await rest(stub.Generate(request))
        assert bytes(answer.complete.output_ids) == b"abcdefg"


async def test_prompts_as_text() -> None:
    async with engine(vllm_facade=True, tokenizer=str(DEMO)) as server, facade(server) as stub:
        request = pb.GenerateRequest(text="abc", sampling_params={"max_tokens": 2})
        (answer,) = await rest(stub.Generate(request))
        assert bytes(answer.complete.output_ids) == b"ab"
        assert answer.complete.prompt_tokens == 3


@pytest.mark.parametrize(
    ("request_", "code", "said"),
    [
        (pb.GenerateRequest(), "INVALID_ARGUMENT", "no prompt"),
        (pb.GenerateRequest(text="a"), "UNIMPLEMENTED", "tokenizer.json"),
        (asked(1, stop=["a"]), "UNIMPLEMENTED", "stop"),
        (asked(1, stop=[""]), "INVALID_ARGUMENT", "empty text"),
        (asked(1, n=1000), "INVALID_ARGUMENT", "n is 1000"),
        (asked(1, truncate_prompt_tokens=0), "INVALID_ARGUMENT", "truncate_prompt_tokens is 0"),
        (asked(), "INVALID_ARGUMENT", "empty"),
    ],
)
async def test_refusals(request_: Any, code: str, said: str) -> None:
    async with engine(vllm_facade=True) as server, facade(server) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rest(stub.Generate(request_))
        assert caught.value.code().name == code
        assert said in caught.value.details()
        assert to_error(caught.value).reason


async def test_aborts_by_id_and_by_leaving() -> None:
    async with engine(vllm_facade=True) as server, facade(server) as stub:
        call = stub.Generate(asked(5, request_id="mine", max_tokens=30_000))
        await call.read()
        await stub.Abort(pb.AbortRequest(request_ids=["mine", "other"]))
        assert (await rest(call))[-1].complete.finish_reason == "abort"
        call = stub.Generate(asked(5, max_tokens=30_000))
        await call.read()
        call.cancel()
        await until(lambda: server.desk.core.finished[FinishReason.ABORTED] == 2)


async def test_the_callers_trace_goes_on() -> None:
    async with engine(vllm_facade=True) as server, facade(server) as stub:
        submit, seen = server.desk.submit, list[Any]()

        def noting(*given: Any) -> int:
            seen.append(given[3])
            return submit(*given)

        server.desk.submit = noting  # type: ignore[method-assign]
        parent = f"00-{'a' * 32}-{'b' * 16}-01"
        metadata = (("traceparent", parent), ("tracestate", "x=y"))
        await rest(stub.Generate(asked(1), metadata=metadata))
        await rest(stub.Generate(asked(1)))
        assert seen == [(parent, "x=y"), ("", "")]


async def test_embeddings() -> None:
    async with engine(vllm_facade=True) as server, facade(server) as stub:
        request = pb.EmbedRequest(tokenized=pb.TokenizedInput(input_ids=[9, 8, 7]))
        answer = await stub.Embed(request)
        assert list(answer.embedding) == [3.0, 9.0, -1.0, 0.0]
        assert (answer.prompt_tokens, answer.embedding_dim) == (3, 4)
        with pytest.raises(grpc.aio.AioRpcError, match="tokenized"):
            await stub.Embed(pb.EmbedRequest())


async def test_facts_and_load() -> None:
    async with engine(vllm_facade=True, tokenizer=str(DEMO)) as server, facade(server) as stub:
        model = await stub.GetModelInfo(pb.GetModelInfoRequest())
        assert (model.model_path, model.model_type, model.max_context_length) == (
            "fake", "qwen3", 40_000,
        )  # fmt: skip
        assert model.is_generation
        assert list(model.eos_token_ids) == [2]
        assert '"temperature": 1.0' in model.default_sampling_params_json
        call = stub.Generate(asked(5, max_tokens=30_000))
        await call.read()
        await until(lambda: server.desk.core.load.running == 1)
        about = await stub.GetServerInfo(pb.GetServerInfoRequest())
        assert (about.active_requests, about.max_num_seqs, about.block_size) == (1, 4, 16)
        (load,) = (await stub.GetLoads(pb.GetLoadsRequest(include=["core"]))).loads
        assert (load.num_running_reqs, load.num_used_tokens, load.token_usage) == (1, 256, 0.25)
        with pytest.raises(grpc.aio.AioRpcError, match="dp_rank is 3"):
            await stub.GetLoads(pb.GetLoadsRequest(dp_rank=3))
        call.cancel()


@pytest.mark.parametrize(
    "config",
    [
        "<html>not found</html>",
        "[" * 100_000,
        '{"model_type": 3, "pad_token_id": "no", "bos_token_id": [1, 2]}',
        '{"pad_token_id": -1, "bos_token_id": 4294967295}',
    ],
    ids=["no JSON", "too deep", "no ids", "no such ids"],
)
async def test_facts_need_no_configuration_beside_the_tokenizer(
    tmp_path: Path, config: str
) -> None:
    """It was answered as an error of the engine's own."""
    (tmp_path / "tokenizer.json").write_bytes((DEMO / "tokenizer.json").read_bytes())
    (tmp_path / "config.json").write_text(config)
    async with engine(vllm_facade=True, tokenizer=str(tmp_path)) as server, facade(server) as stub:
        model = await stub.GetModelInfo(pb.GetModelInfoRequest())
    assert (model.model_path, model.pad_token_id, model.bos_token_id) == ("fake", 0, 0)


async def test_the_tokenizer_comes_as_an_archive() -> None:
    async with engine(vllm_facade=True, tokenizer=str(DEMO)) as server, facade(server) as stub:
        chunks = await rest(stub.GetTokenizer(common_pb2.GetTokenizerRequest()))
        packed = b"".join(chunk.data for chunk in chunks)
        assert [chunk.sha256 for chunk in chunks[:-1]] == [""] * (len(chunks) - 1)
        assert chunks[-1].sha256 == hashlib.sha256(packed).hexdigest()
        with zipfile.ZipFile(io.BytesIO(packed)) as files:
            for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
                assert files.read(name) == (DEMO / name).read_bytes()


async def test_the_archive_has_what_the_operator_says_over_the_configuration() -> None:
    said = {"tokenizer": str(DEMO), "hf_overrides": {"id2label": {"0": "spam"}}}
    async with engine(vllm_facade=True, **said) as server, facade(server) as stub:
        chunks = await rest(stub.GetTokenizer(common_pb2.GetTokenizerRequest()))
        with zipfile.ZipFile(io.BytesIO(b"".join(chunk.data for chunk in chunks))) as files:
            config = json.loads(files.read("config.json"))
    assert config == json.loads((DEMO / "config.json").read_bytes()) | said["hf_overrides"]


async def test_health_follows_the_state() -> None:
    slow = engine(wait=False, vllm_facade=True, model="fake-slow")
    async with slow as server, facade(server) as stub:
        assert not (await stub.HealthCheck(pb.HealthCheckRequest())).healthy
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetModelInfo(pb.GetModelInfoRequest())
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    async with engine(vllm_facade=True) as server, facade(server) as stub:
        assert (await stub.HealthCheck(pb.HealthCheckRequest())).healthy
        server.desk.board.move(EngineState.DRAINING, "told to")
        answer = await stub.HealthCheck(pb.HealthCheckRequest())
        assert (answer.healthy, answer.message) == (False, "told to")


async def test_an_engine_whose_core_is_silent_is_not_healthy() -> None:
    """A core speaks every second: too seldom for this engine, which looks four times a second."""
    impatient = engine(vllm_facade=True, heartbeat_timeout_s=0.01)
    async with impatient as server, facade(server) as stub:
        await until(lambda: server.desk.board.snapshot.stalled)
        answer = await stub.HealthCheck(pb.HealthCheckRequest())
        assert not answer.healthy
        assert "has said nothing" in answer.message


@pytest.mark.parametrize("flag", [True, False])
async def test_health_and_reflection_know_its_name_where_it_is_served(flag: bool) -> None:
    name = pb.DESCRIPTOR.services_by_name["VllmEngine"].full_name
    async with (
        engine(vllm_facade=flag, reflection=True) as server,
        grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel,
    ):
        listed = await health_pb2_grpc.HealthStub(channel).List(health_pb2.HealthListRequest())
        assert (name in listed.statuses) is flag
        if flag:
            await until_health(server, name, SERVING)
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        found = {one.name for one in (await call.read()).list_services_response.service}
        assert (name in found) is flag
        call.cancel()


async def test_every_rpc_of_the_contract_answers() -> None:
    """A new one of the wheel fails here until it is served or refused."""
    rpcs = {one.name for one in pb.DESCRIPTOR.services_by_name["VllmEngine"].methods}
    served = {
        "Generate", "Embed", "HealthCheck", "Abort", "GetModelInfo", "GetServerInfo", "GetLoads",
        "GetTokenizer", "SubscribeKvEvents",
    }  # fmt: skip
    refused = {
        "FlushCache": common_pb2.FlushCacheRequest(),
        "StartProfile": common_pb2.StartProfileRequest(),
        "StopProfile": common_pb2.StopProfileRequest(),
    }
    assert rpcs == served | set(refused)
    async with engine(vllm_facade=True) as server, facade(server) as stub:
        for name, request in refused.items():
            with pytest.raises(grpc.aio.AioRpcError, match=name) as caught:
                await getattr(stub, name)(request)
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
            assert "VllmEngine" in caught.value.details()


async def test_it_is_served_on_demand_only() -> None:
    async with engine() as server, facade(server) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.HealthCheck(pb.HealthCheckRequest())
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED

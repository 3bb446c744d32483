"""EngineService.Pool over real gRPC, in front of a core that tells what it was asked."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from prometheus_client import generate_latest

from engine_service.core.messages import FinishReason
from tests.service.engine_fixtures import engine, info, pack, stubs
from tests.waiting import until
from tidemill.runtime.rpc import to_error
from tidemill.v1 import engine_pb2 as pb

SLOW = 30_000
"""Tokens of a prompt that the fake core computes for a minute."""


async def test_a_vector_and_what_it_cost() -> None:
    async with engine() as server, stubs(server) as stub:
        request = pb.PoolRequest(prompt_token_ids=pack(40, 41, 42), normalize=False, dimensions=3)
        answer = await stub.Pool(request)
        assert list(answer.values) == [3, 40, 0, 3]
        assert (answer.usage.prompt_tokens, answer.usage.output_tokens) == (3, 0)
        plain = await stub.Pool(pb.PoolRequest(prompt_token_ids=pack(7)))
        assert list(plain.values) == [1, 7, -1, 0]
        assert server.desk.core.finished == {FinishReason.STOP: 2}
        metrics = generate_latest(server.desk.observer.metrics.registry).decode()
    assert 'request_success_total{finished_reason="stop",model_name="fake"} 2.0' in metrics
    assert "length" not in metrics.partition("request_success_total{")[2].partition("# HELP")[0]


async def test_many_at_once_each_get_their_own() -> None:
    async with engine() as server, stubs(server) as stub:
        requests = [pb.PoolRequest(prompt_token_ids=pack(*range(n, 2 * n))) for n in range(1, 7)]
        answers = await asyncio.gather(*(stub.Pool(one) for one in requests))
        assert [list(one.values)[:2] for one in answers] == [[n, n] for n in range(1, 7)]


@pytest.mark.parametrize(
    ("request_", "code", "param"),
    [
        (pb.PoolRequest(), "INVALID_ARGUMENT", "prompt_token_ids"),
        (pb.PoolRequest(prompt_token_ids=pack(1), adapter="a"), "UNIMPLEMENTED", "adapter"),
        (
            pb.PoolRequest(prompt_token_ids=pack(1), pooling="POOLING_KIND_UNSPECIFIED"),
            "INVALID_ARGUMENT",
            "pooling",
        ),
        (
            pb.PoolRequest(prompt_token_ids=pack(1), request_id="x" * 300),
            "INVALID_ARGUMENT",
            "request_id",
        ),
    ],
)
async def test_refusals(request_: pb.PoolRequest, code: str, param: str) -> None:
    async with engine() as server, stubs(server) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Pool(request_)
        assert caught.value.code().name == code
        assert to_error(caught.value).param == param


async def test_a_client_that_leaves_ends_its_request() -> None:
    async with engine() as server, stubs(server) as stub:
        call = stub.Pool(pb.PoolRequest(prompt_token_ids=pack(*range(SLOW))))
        await until(lambda: server.desk.core.num_live == 1)
        call.cancel()
        await until(lambda: server.desk.core.num_live == 0)
        assert server.desk.core.finished == {FinishReason.ABORTED: 1}


async def test_abort_knows_the_request() -> None:
    async with engine() as server, stubs(server) as stub:
        call = stub.Pool(pb.PoolRequest(prompt_token_ids=pack(*range(SLOW)), request_id="mine"))
        await until(lambda: server.desk.core.num_live == 1)
        await stub.Abort(pb.AbortRequest(request_ids=["mine"]))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert caught.value.code() is grpc.StatusCode.CANCELLED


async def test_the_requests_own_time_limit() -> None:
    async with engine() as server, stubs(server) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Pool(pb.PoolRequest(prompt_token_ids=pack(*range(SLOW)), timeout_ms=20))
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert server.desk.core.finished == {FinishReason.DEADLINE: 1}


async def test_the_engine_says_what_it_pools() -> None:
    async with engine() as server, info(server) as stub:
        answer = await stub.GetEngineInfo(pb.GetEngineInfoRequest())
        assert answer.pooling == pb.PoolingInfo(
            tasks=[pb.POOL_TASK_EMBED], default_pooling=pb.POOLING_KIND_LAST, dimensions=4
        )

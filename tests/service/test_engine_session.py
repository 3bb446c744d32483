"""The Session stream over real gRPC, against a core whose tokens can be computed by hand."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from engine_service.core.messages import FinishReason, Submit
from engine_service.server import session as session_file
from tests.service.engine_fixtures import engine, session, spec, stubs
from tests.waiting import PATIENCE_S, until
from tidemill.runtime.rpc import to_error
from tidemill.v1 import engine_pb2 as pb

LOGPROBS = pb.LogprobsSpec(top=0)


async def test_tokens_and_one_end_per_handle() -> None:
    async with engine() as server, stubs(server) as stub, session(stub) as client:
        ack = client.frames[0].hello_ack
        assert (ack.model_id, ack.limits.max_rows, ack.protocol_major) == ("fake", 4, 1)
        await client.submit(7, 100, max_tokens=5)
        await client.submit(9, 200, max_tokens=3)
        await client.drain(7, 9)
        assert client.tokens == {7: [100, 101, 102, 103, 104], 9: [200, 201, 202]}
        assert [end.reason for ends in client.ends.values() for end in ends] == [4, 4]
        assert client.ends[7][0].usage.output_tokens == 5


async def test_a_session_without_hello_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each held its stream, and a place in every report, until the server stopped."""
    monkeypatch.setattr(session_file, "_HELLO_S", 0.2)
    async with engine() as server, stubs(server) as stub, asyncio.timeout(PATIENCE_S):
        call = stub.Session()
        await call.initial_metadata()
        with pytest.raises(grpc.aio.AioRpcError, match=r"no Hello within 0\.2 s") as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        async with session(stub) as client:
            await client.submit(1, 10, max_tokens=2)
            await client.drain(1)


async def test_half_closed_session_is_served_to_its_end() -> None:
    async with engine() as server, stubs(server) as stub, session(stub) as client:
        await client.submit(1, 10, max_tokens=20)
        await client.call.done_writing()
        while await client.read() is not None:
            pass
        assert client.tokens[1] == list(range(10, 30))
        assert await client.call.code() is grpc.StatusCode.OK


@pytest.mark.parametrize("phase", ["queued", "prefill", "decode"])
async def test_lost_stream_aborts_in_every_phase(phase: str) -> None:
    async with engine() as server, stubs(server) as stub, stubs(server) as other:
        core = server.desk.core
        async with session(other) as neighbour, session(stub) as client:
            if phase == "queued":
                for handle in range(1, 5):
                    await neighbour.submit(handle, handle, max_tokens=30_000)
                await neighbour.first_token(4)
            prompt = [5] * 5000 if phase == "prefill" else [5]
            await client.submit(1, *prompt, max_tokens=10_000)
            await until(lambda: core.num_live == (5 if phase == "queued" else 1))
            if phase == "decode":
                await client.first_token(1)
            client.call.cancel()
            await until(lambda: core.finished[FinishReason.ABORTED] == 1)
            if phase == "queued":
                while len(neighbour.tokens[2]) < 150:
                    assert await neighbour.read() is not None
                assert neighbour.tokens[2] == list(range(2, 2 + len(neighbour.tokens[2])))
                assert not neighbour.ends
        await until(lambda: core.num_live == 0)


async def test_lost_stream_aborts_while_a_write_is_blocked() -> None:
    small = [("grpc.http2.lookahead_bytes", 16384), ("grpc.http2.bdp_probe", 0)]
    async with (
        engine(simulated_step_ms=0.05) as server,
        stubs(server, *small) as stub,
        session(stub) as client,
    ):
        for handle in range(4):
            await client.submit(handle, 1, max_tokens=1_000_000, logprobs=LOGPROBS)
        outlet = next(iter(server.desk.sessions.values()))._outlet
        await until(lambda: outlet._slots)
        client.call.cancel()
        await until(lambda: server.desk.core.finished[FinishReason.ABORTED] == 4)


async def test_abort_frame_late_abort_and_stop_matched() -> None:
    async with engine() as server, stubs(server) as stub, session(stub) as client:
        await client.submit(1, 50, max_tokens=10_000)
        await client.submit(2, 60, max_tokens=10_000)
        await client.first_token(1)
        for _ in range(2):
            await client.send(abort=pb.AbortHandles(handles=[1, 77]))
        stop = pb.StopMatched(handle=2, completion_tokens=1, stop_string="END")
        await client.send(stop_matched=stop)
        await client.drain(1, 2)
        await client.send(abort=pb.AbortHandles(handles=[1]))
        await client.send(ping=pb.Ping(nonce=3))
        while not client.frames[-1].HasField("pong"):
            assert await client.read() is not None
        assert [end.reason for end in client.ends[1]] == [pb.FINISH_REASON_ABORTED]
        (end,) = client.ends[2]
        assert (end.reason, end.detail) == (pb.FINISH_REASON_STOP_STRING, "END")
        assert end.usage.output_tokens == 1


async def test_refusals_name_the_field_and_touch_nobody_else() -> None:
    async with engine() as server, stubs(server) as stub, session(stub) as client:
        await client.submit(1, 10, max_tokens=100)
        await client.submit(2)
        odd = pb.GenerateSpec(prompt_token_ids=b"abc")
        await client.send(submit=pb.Submit(handle=3, spec=odd))
        await client.submit(4, 1, adapter="lora")
        await client.drain(1, 2, 3, 4)
        ends = {handle: end[0] for handle, end in client.ends.items()}
        assert (ends[2].code, ends[2].param) == (3, "prompt_token_ids")
        assert ends[3].code == 3
        assert "3 bytes" in ends[3].message
        assert (ends[4].code, ends[4].param) == (12, "adapter")
        assert client.tokens[1] == list(range(10, 110))


async def test_a_bug_in_reading_a_request_ends_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    real = session_file.to_submit

    def broken(given: pb.GenerateSpec) -> Submit:
        if given.cache_salt == "bug":
            raise ZeroDivisionError("a bug")
        return real(given)

    monkeypatch.setattr(session_file, "to_submit", broken)
    async with engine() as server, stubs(server) as stub, session(stub) as client:
        await client.submit(1, 10, max_tokens=100)
        await client.submit(2, 20, cache_salt="bug")
        await client.drain(1, 2)
        failed = client.ends[2][0]
        assert (failed.code, failed.reason) == (13, "INTERNAL")
        assert "ZeroDivisionError: a bug" in failed.message
        assert client.tokens[1] == list(range(10, 110))


async def test_duplicate_handle_ends_both() -> None:
    async with engine() as server, stubs(server) as stub, session(stub) as client:
        await client.submit(1, 10, max_tokens=100_000)
        await client.submit(2, 20, max_tokens=50)
        await client.first_token(1)
        await client.submit(1, 30)
        await client.drain(1, 2)
        assert [end.reason for end in client.ends[1]] == ["DUPLICATE_HANDLE"]
        await until(lambda: server.desk.core.num_live == 0)
        assert client.tokens[2] == list(range(20, 70))


async def test_overload_is_refused_with_a_delay() -> None:
    async with engine() as server, stubs(server) as stub, session(stub) as client:
        taken, refused = range(6), range(6, 12)
        for handle in (*taken, *refused):
            await client.submit(handle, 1, max_tokens=30_000)
        await client.drain(*refused)
        assert client.ends.keys() == set(refused)
        ends = [client.ends[handle][0] for handle in refused]
        assert all((end.code, end.retriable, end.retry_after_ms) == (8, True, 500) for end in ends)
        await client.send(abort=pb.AbortHandles(handles=taken))
        await client.drain(*taken)
        assert sum(map(len, client.ends.values())) == 12


async def test_hello_of_another_major_version_is_refused() -> None:
    async with engine() as server, stubs(server) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async with session(stub, major=2):
                pass
        error = to_error(caught.value)
        assert error.reason == "PROTOCOL_MISMATCH"
        assert "2.0" in error.message
        call = stub.Session()
        await call.write(pb.SessionRequest(submit=pb.Submit(handle=1, spec=spec(1))))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION


async def test_slow_reader_is_bounded_and_neighbours_are_not_affected() -> None:
    small = [("grpc.http2.lookahead_bytes", 65536), ("grpc.http2.bdp_probe", 0)]
    async with (
        engine(simulated_step_ms=0.05) as server,
        stubs(server, *small) as stub,
        stubs(server) as other,
        session(stub) as slow,
        session(other) as quick,
    ):
        await slow.submit(1, 5, max_tokens=30_000, logprobs=LOGPROBS)
        outlet = next(iter(server.desk.sessions.values()))._outlet
        await quick.submit(1, 9, max_tokens=3000)
        await quick.drain(1)
        assert quick.tokens[1] == list(range(9, 3009))
        assert len(outlet) <= 2
        await slow.drain(1)
        assert slow.tokens[1] == list(range(5, 30_005))


async def test_heartbeat_when_idle() -> None:
    async with engine() as server, stubs(server) as stub, session(stub) as client:
        frame = await asyncio.wait_for(client.read(), PATIENCE_S)
        assert frame.HasField("load_report")
        while not frame.load_report.load.pages_total:  # the core has said nothing yet
            frame = await asyncio.wait_for(client.read(), PATIENCE_S)
            assert frame.HasField("load_report")

"""One trace through a decode engine and the prefill engine that it asks for KV."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.otlp import Collector, collecting, values_of
from tests.service.engine_fixtures import stubs
from tests.service.test_kv_transfer import PAGE, address, answer, asking, engines, is_free
from tests.waiting import until

ABOVE = "00f067aa0ba902b7"
GENERATE = "tidemill.v1.EngineService/Generate"
TRANSFER = "tidemill.v1.KvTransferService/Transfer"
BYTES = 3 * PAGE * 2 * 2 * 16 * 4
"""Of three pages: layers, keys and values, head size, float32."""


def header(trace: int, *, sampled: bool = True) -> str:
    return f"00-{trace:032x}-{ABOVE}-0{int(sampled)}"


def below(collector: Collector, span: Any) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for one in collector.spans:
        if one.parent_span_id == span.span_id:
            assert one.trace_id == span.trace_id
            found.setdefault(one.name, []).append(one)
    return found


def root_of(collector: Collector, trace: int) -> Any:
    (root,) = (one for one in collector.of_trace(f"{trace:032x}") if one.name == GENERATE)
    assert root.parent_span_id.hex() == ABOVE
    return root


async def test_a_trace_goes_on_in_the_prefill_engine(tmp_path: Path) -> None:
    """Of a transfer that is done, of two choices that share one, of one that fails, and of a
    request that nobody traces."""
    prompt = [3 + i for i in range(3 * PAGE + 5)]
    with collecting() as (collector, endpoint):
        flags = [{"role": role, "otlp_endpoint": endpoint} for role in ("prefill", "decode")]
        async with engines(tmp_path, *flags) as (source, target), stubs(target) as here:
            at = address(source)
            for trace, where in ((1, at), (2, "127.0.0.1:9"), (3, at)):
                given = header(trace, sampled=trace != 3)
                await answer(here, asking(prompt, where, cache_salt=str(trace), traceparent=given))
            shared = asking(prompt, at, cache_salt="4", traceparent=header(4))
            shared.n = 2
            await answer(here, shared)
            for one in (source, target):
                await until(lambda one=one: is_free(one))
    check_done(collector, at)
    (failed,) = below(collector, root_of(collector, 2))["engine.transfer"]
    assert (values_of(failed)["tidemill.outcome"], failed.status.code) == ("failed", 2)
    assert "127.0.0.1:9" in failed.status.message
    assert collector.of_trace(f"{3:032x}") == []
    both = [one for one in collector.of_trace(f"{4:032x}") if one.name == GENERATE]
    waits = [one for root in both for one in below(collector, root)["engine.transfer"]]
    assert sorted(one.kind for one in waits) == [1, 3], "one of them asks, the other one waits"
    assert [len(below(collector, one)) for one in sorted(waits, key=lambda w: w.kind)] == [0, 1]
    assert [values_of(one)["tidemill.bytes"] for one in waits] == [BYTES] * 2


def check_done(collector: Collector, source: str) -> None:
    moved = {"tidemill.outcome": "done", "tidemill.tokens": 3 * PAGE, "tidemill.bytes": BYTES}
    phases = below(collector, root_of(collector, 1))
    (fetch,), (queue,) = phases["engine.transfer"], phases["engine.queue"]
    assert values_of(fetch).items() >= {**moved, "tidemill.peer": source}.items()
    assert fetch.end_time_unix_nano <= queue.start_time_unix_nano, "its time is no queue's"
    ((call,),) = below(collector, fetch).values()
    assert (call.name, call.kind) == (TRANSFER, 2)
    found = values_of(call)
    assert found.items() >= {**moved, "rpc.response.status_code": "OK"}.items()
    assert found["tidemill.peer"].startswith("ipv4:127.0.0.1:")
    parts = below(collector, call)
    assert sorted(parts) == ["engine.compute", "engine.send"]
    (computed,), (sent,) = parts["engine.compute"], parts["engine.send"]
    assert values_of(computed)["gen_ai.usage.input_tokens"] == 3 * PAGE
    assert {"engine.queue", "engine.prefill"} <= set(below(collector, computed))
    assert computed.end_time_unix_nano <= sent.start_time_unix_nano
    assert sent.end_time_unix_nano <= call.end_time_unix_nano

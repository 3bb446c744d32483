"""Allowances and headers as clients see them, over both faces of a real frontend."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest

from frontend.app import FrontendServer
from frontend.config import FrontendConfig
from frontend.gate import Gate, RateLimited
from tests.service.frontends import stack
from tests.service.test_frontend_gate import bearer, written
from tests.waiting import PATIENCE_S
from tidemill.client import AsyncClient
from tidemill.exchange import CallOptions
from tidemill.runtime.errors import InvalidRequest, Overloaded
from tidemill.sampling_params import SamplingParams
from tidemill.security.keys import new_key

WAIT = CallOptions(timeout_s=PATIENCE_S)
SOME = SamplingParams(max_tokens=4)
BODY = {"prompt": "ab", "max_tokens": 3}
ALL = [f"x-ratelimit-{what}-requests" for what in ("limit", "remaining", "reset")]


async def test_a_key_has_its_requests_and_its_neighbour_keeps_its_own(tmp_path: Path) -> None:
    """429 with Retry-After and what is left, as OpenAI's clients read them, on HTTP; on gRPC
    RESOURCE_EXHAUSTED with RetryInfo, out of the same allowance."""
    alice, bob = new_key("alice"), new_key("bob")
    path = written(tmp_path, alice, bob)
    async with stack(tmp_path, api_keys_file=path, key_requests_per_minute=3) as served:
        async with served.http() as client:
            left = []
            for _ in range(2):
                answer = await client.post("/v1/completions", json=BODY, headers=bearer(alice.key))
                assert answer.status_code == 200
                left.append(answer.headers["x-ratelimit-remaining-requests"])
            assert left == ["2", "1"]
            async with AsyncClient(served.grpc_address, api_key=alice.key, max_retries=0) as text:
                await text.generate("ab", SOME, WAIT)
                with pytest.raises(Overloaded) as refused:
                    await text.generate("ab", SOME, WAIT)
                assert refused.value.reason == "RATE_LIMIT_EXCEEDED"
                assert 0 < (refused.value.retry_after_ms or 0) <= 20_000
            answer = await client.post("/v1/completions", json=BODY, headers=bearer(alice.key))
            assert answer.status_code == 429
            assert 1 <= int(answer.headers["retry-after"]) <= 20
            assert [answer.headers[name] for name in ALL[:2]] == ["3", "0"]
            error = answer.json()["error"]
            assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
            answer = await client.post("/v1/completions", json=BODY, headers=bearer(bob.key))
            assert answer.status_code == 200
        served_to = openai.AsyncOpenAI(
            base_url=f"{served.url}/v1", api_key=alice.key, max_retries=0
        )
        async with served_to:
            with pytest.raises(openai.RateLimitError):
                await served_to.completions.create(model="fake", prompt="ab")
        assert len(served.engine.submits) == 4, "nobody else came to the engine"


async def test_prompts_and_outputs_are_taken_from_the_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was delivered to a client that left counts too; debts delay the next request. Time
    stands still at the gate, so nothing is refilled."""
    monkeypatch.setattr("frontend.app.Gate", lambda config: Gate(config, lambda: 5.0))
    alice = new_key("alice")
    path = written(tmp_path, alice)
    flags: dict[str, Any] = {"api_keys_file": path, "key_tokens_per_minute": 40}
    async with stack(tmp_path, **flags) as served, served.http() as client:

        async def left() -> int:
            answer = await client.get("/v1/models", headers=bearer(alice.key))
            return int(answer.headers["x-ratelimit-remaining-tokens"])

        assert await left() == 40
        await client.post("/v1/completions", json=BODY, headers=bearer(alice.key))
        assert await left() == 35  # 2 and 3
        await client.post("/v1/embeddings", json={"input": "abcdefghij"}, headers=bearer(alice.key))
        assert await left() == 25
        stream = {"prompt": "ab" * 20, "max_tokens": 60, "stream": True}
        async with client.stream(
            "POST", "/v1/completions", json=stream, headers=bearer(alice.key)
        ) as answer:
            assert "data" in "".join([line async for line in answer.aiter_lines()])
        answer = await client.post("/v1/completions", json=BODY, headers=bearer(alice.key))
        assert answer.status_code == 429
        assert "40 tokens per minute" in answer.json()["error"]["message"]
        assert int(answer.headers["retry-after"]) == 114, "75 tokens are owed, and one is asked for"


async def test_an_address_is_slowed_down_before_its_key_is_looked_at(tmp_path: Path) -> None:
    """Whoever guesses keys gets a 429 sooner than another 401; health stays open."""
    flags: dict[str, Any] = {"api_key": "k" * 40, "ip_requests_per_minute": 3}
    async with stack(tmp_path, **flags) as served, served.http() as client:
        wrong = [await client.get("/v1/models", headers=bearer(f"tm-{n}")) for n in range(5)]
        assert [answer.status_code for answer in wrong] == [401, 401, 401, 429, 429]
        assert (await client.get("/v1/models", headers=bearer("k" * 40))).status_code == 429
        assert (await client.get("/health/live")).status_code == 200
        async with AsyncClient(served.grpc_address, api_key="k" * 40, max_retries=0) as text:
            with pytest.raises(Overloaded):
                await text.list_models()


async def test_addresses_behind_a_proxy_have_their_own_allowances(tmp_path: Path) -> None:
    flags: dict[str, Any] = {"ip_requests_per_minute": 1, "trusted_proxies": "127.0.0.1"}
    async with stack(tmp_path, **flags) as served:
        async with served.http() as client:
            for address, status in (("1.1.1.1", 200), ("1.1.1.1", 429), ("2.2.2.2", 200)):
                headers = {"x-forwarded-for": f"9.9.9.9, {address}"}
                answer = await client.get("/v1/models", headers=headers)
                assert answer.status_code == status
            for made_up, address, status in (("4.4.4.4", "1.1.1.1", 429), ("5", "6.6.6.6", 200)):
                lines = [("x-forwarded-for", made_up), ("x-forwarded-for", address)]
                answer = await client.get("/v1/models", headers=lines)
                assert answer.status_code == status, "some proxies add a line of their own"
        async with grpc.aio.insecure_channel(served.grpc_address) as channel:
            ask = channel.unary_unary("/tidemill.v1.TextService/ListModels")
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await ask(b"", metadata=(("x-forwarded-for", "2.2.2.2"),), timeout=PATIENCE_S)
            assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert await ask(b"", metadata=(("x-forwarded-for", "3.3.3.3"),), timeout=PATIENCE_S)


def test_ten_thousand_addresses_at_one_gate() -> None:
    """Each has its own allowance and none has more; memory is that of the limit."""
    gate = Gate(FrontendConfig(ip_requests_per_minute=1, ip_tokens_per_minute=10), lambda: 5.0)
    clients = [f"10.1.{number >> 8}.{number & 255}" for number in range(10_000)]
    for client in clients:
        assert gate.admit(client, "", "").caller == ""
    for client in clients[::100]:
        with pytest.raises(RateLimited):
            gate.admit(client, "", "")
    assert len(gate._of_address._requests or ()) == 10_000


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"ip_requests_per_minute": -1}, "ip_requests_per_minute"),
        ({"key_tokens_per_minute": 5}, "need keys"),
        ({"cors_origins": "*", "cors_credentials": True}, "cors_credentials"),
        ({"cors_origins": "https://a.example, b.example"}, "'b.example', which no page is of"),
        ({"cors_origins": "https://a.example/"}, "'https://a.example/'"),
        ({"cors_origins": "https://A.example"}, "'https://A.example'"),
        ({"cors_origins": "https://*.example"}, r"https://\*.example"),
        ({"cors_origins": "*", "cors_methods": "GET,post"}, "cors_methods has 'post'"),
        ({"cors_origins": "*", "cors_methods": "GET,P\u00d6ST"}, "cors_methods has 'P\u00d6ST'"),
        ({"cors_origins": "*", "cors_headers": "x-a,x-\u20ac"}, "cors_headers has 'x-\u20ac'"),
        ({"cors_origins": "*", "cors_headers": "x-a\nx-b"}, r"cors_headers has 'x-a\\nx-b'"),
    ],
)
async def test_settings_that_do_not_fit_end_the_start(flags: Any, named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        await FrontendServer.start(FrontendConfig(http_port=0, grpc_port=0, **flags))


def preflight(origin: str) -> dict[str, str]:
    return {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization, content-type",
    }


async def test_pages_of_named_origins_may_call_and_read_refusals(tmp_path: Path) -> None:
    """Preflights come without a key, and an answer that refuses can be read all the same."""
    flags: dict[str, Any] = {"api_key": "k" * 40, "cors_origins": "https://app.example"}
    async with stack(tmp_path, **flags) as served, served.http() as client:
        asked = await client.options("/v1/completions", headers=preflight("https://app.example"))
        assert asked.status_code == 200
        assert asked.headers["access-control-allow-origin"] == "https://app.example"
        assert "authorization" in asked.headers["access-control-allow-headers"]
        refused = await client.get("/v1/models", headers={"origin": "https://app.example"})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "https://app.example"
        assert "x-ratelimit-reset-tokens" in refused.headers["access-control-expose-headers"]
        other = await client.options("/v1/completions", headers=preflight("https://evil.example"))
        assert other.status_code == 400
        assert "access-control-allow-origin" not in other.headers


async def test_any_origin_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with stack(tmp_path, cors_origins="*") as served, served.http() as client:
        answer = await client.get("/version", headers={"origin": "https://any.example"})
        assert answer.headers["access-control-allow-origin"] == "*"
    warned = [one for one in caplog.records if one.levelno == logging.WARNING]
    assert ["--cors-origins *" in one.getMessage() for one in warned] == [True]


def check_safe(answer: httpx.Response) -> None:
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["x-frame-options"] == "DENY"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert "strict-transport-security" not in answer.headers, "only over TLS"
    for name, count in {name: answer.headers.get_list(name) for name in answer.headers}.items():
        assert len(count) == 1, name


async def test_answers_of_all_kinds_have_the_headers_that_keep_browsers_safe(
    tmp_path: Path,
) -> None:
    async with stack(tmp_path, max_body_bytes=1000) as served, served.http() as client:
        stream = await client.post("/v1/completions", json={**BODY, "stream": True})
        large = await client.post("/v1/completions", content=b"x" * 1001)
        for answer in (stream, large, await client.get("/health"), await client.get("/nowhere")):
            check_safe(answer)
            wanted = "default-src 'none'; frame-ancestors 'none'"
            assert answer.headers["content-security-policy"] == wanted
        assert (stream.status_code, large.status_code) == (200, 413)
        page = await client.get("/")
        check_safe(page)
        assert page.headers["content-security-policy"].startswith("default-src 'self'")


async def test_who_guesses_keys_at_a_route_that_wants_none_is_slowed_down_too(
    tmp_path: Path,
) -> None:
    """/health tells more to a key that is right, so it says which one is: any number of guesses a
    minute would do there."""
    made = new_key("alice")
    async with (
        stack(tmp_path, api_keys_file=written(tmp_path, made), ip_requests_per_minute=3) as served,
        served.http() as client,
    ):

        async def told(*keys: str) -> list[bool]:
            answers = [await client.get("/health", headers=bearer(key)) for key in keys]
            assert {answer.status_code for answer in answers} == {200}
            return ["engines" in answer.json() for answer in answers]

        assert [(await client.get("/health")).status_code for _ in range(5)] == [200] * 5
        assert await told(*[made.key] * 5) == [True] * 5, "those who probe pay nothing"
        assert await told("wrong", "wrong", "wrong", made.key) == [False] * 4
        refused = await client.get("/v1/models", headers=bearer(made.key))
        assert refused.status_code == 429, "one allowance for all routes"

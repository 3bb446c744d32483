"""Refusals name parameters as the client wrote them; the engine is a fake that refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.service.frontends import stack
from tidemill.runtime.errors import InvalidRequest
from tidemill.runtime.rpc import to_error
from tidemill.v1 import text_pb2 as pb
from tidemill.v1 import text_pb2_grpc as rpc

CHAT = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]})
COMPLETION = ("/v1/completions", {"prompt": "hi"})
RESPONSE = ("/v1/responses", {"input": "hi"})


@pytest.mark.parametrize(
    ("route", "fields", "param", "words"),
    [
        (CHAT, {"max_completion_tokens": 0}, "max_completion_tokens", "or left out"),
        (CHAT, {"max_tokens": 0}, "max_tokens", "or left out"),
        (COMPLETION, {"max_completion_tokens": 0}, "max_completion_tokens", "set echo to true"),
        (COMPLETION, {"max_tokens": 0, "suffix": "b"}, "max_tokens", "set echo to true"),
    ],
)
async def test_no_tokens_are_refused_as_the_client_wrote_it(
    tmp_path: Path, route: Any, fields: dict[str, Any], param: str, words: str
) -> None:
    """Chats were told of max_tokens, which they had not sent, and of echo, which they have not."""
    path, body = route
    async with stack(tmp_path, engine={"mask_token_id": 264}) as served, served.http() as client:
        error = (await client.post(path, json={**body, **fields})).json()["error"]
    assert error["param"] == param
    assert error["message"].startswith(f"{param} is 0; it must be at least 1")
    assert words in error["message"]
    assert ("echo" in error["message"]) == (route is COMPLETION)


KNOB = {"params": {"steps": 5}}
LENGTH = "max_tokens 8 makes"
REFUSED = InvalidRequest(
    f"The decoding parameter steps is 5; it must be what {LENGTH}", param="decoding.params.steps"
)


@pytest.mark.parametrize(
    ("route", "fields", "param", "told"),
    [
        (CHAT, {"steps": 5, "max_completion_tokens": 8}, "steps", "max_completion_tokens 8"),
        (COMPLETION, {"steps": 5, "max_tokens": 8}, "steps", LENGTH),
        (COMPLETION, {"decoding": KNOB, "max_tokens": 8}, "decoding.params.steps", LENGTH),
        (
            RESPONSE,
            {"decoding": KNOB, "max_output_tokens": 8},
            "decoding.params.steps",
            "max_output_tokens 8",
        ),
    ],
)
async def test_the_engines_refusal_names_what_the_client_wrote(
    tmp_path: Path, route: Any, fields: dict[str, Any], param: str, told: str
) -> None:
    path, body = route
    async with stack(tmp_path) as served, served.http() as client:
        served.engine.refuse = REFUSED
        error = (await client.post(path, json={**body, **fields})).json()["error"]
    assert error["param"] == param
    assert told in error["message"]


async def test_infill_is_told_of_its_gap(tmp_path: Path) -> None:
    async with (
        stack(tmp_path, engine={"mask_token_id": 264}) as served,
        grpc.aio.insecure_channel(served.grpc_address) as channel,
    ):
        served.engine.refuse = REFUSED
        asked = pb.InfillRequest(prefix="a", suffix="b", gap_tokens=8)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rpc.TextServiceStub(channel).Infill(asked)
    assert "gap_tokens 8 makes" in to_error(caught.value).message

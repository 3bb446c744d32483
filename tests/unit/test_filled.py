"""Fields that no message has a place for are refused by their name."""

from __future__ import annotations

import asyncio
import io
import sys
from collections.abc import Callable
from typing import Any

import numpy
import pytest

from tidemill import AsyncClient, Client, SamplingParams
from tidemill.commands import chat
from tidemill.exchange import CallOptions, chat_fields, text_fields
from tidemill.filled import filled
from tidemill.runtime.errors import InvalidRequest
from tidemill.v1 import text_pb2 as pb

LONE = "\ud83d"


@pytest.mark.parametrize(
    ("params", "place"),
    [
        ({"seed": -1}, "options.sampling.seed: Value out of range: -1"),
        ({"max_tokens": 2**40}, "options.sampling.max_tokens: "),
        ({"logit_bias": {2**40: 1.0}}, "options.sampling.logit_bias: "),
        ({"stop": ["a", LONE]}, "options.stop: 'utf-8' codec"),
    ],
)
def test_the_place_is_named(params: dict[str, Any], place: str) -> None:
    fields = text_fields("a", SamplingParams(**params), None)
    with pytest.raises(InvalidRequest) as refused:
        filled(pb.TextServiceGenerateRequest, fields)
    assert refused.value.message.startswith(place)
    assert refused.value.param == next(iter(params))


def test_of_several_the_one_that_does_not_fit() -> None:
    said = [{"role": "user", "content": "a"}, {"role": "user", "content": LONE}]
    with pytest.raises(InvalidRequest, match=r"^messages\[1\]\.parts\[0\]\.text: "):
        filled(pb.ChatRequest, chat_fields(said, None, None))


def test_clients_refuse_by_it() -> None:
    with Client("127.0.0.1:9") as client:
        for call in (
            lambda: client.chat(LONE),
            lambda: client.generate([-1]),
            lambda: client.generate("a", options=CallOptions(model=LONE)),
            lambda: client.tokenize(LONE),
            lambda: client.detokenize([-1]),
            lambda: client.embed([LONE]),
            lambda: client.get_model(LONE),
        ):
            with pytest.raises(InvalidRequest):
                call()


@pytest.mark.parametrize("field", ["request_id", "fairness_key", "traceparent"])
@pytest.mark.parametrize("wrong", ["key\n", "schlüssel", "a\x00"])
def test_what_metadata_cannot_hold_is_named_and_a_key_not_shown(field: str, wrong: str) -> None:
    with (
        Client("127.0.0.1:9") as client,
        pytest.raises(InvalidRequest, match=f"^{field}: character") as refused,
    ):
        client.generate("a", options=CallOptions(**{field: wrong}))
    assert refused.value.param == field
    with pytest.raises(InvalidRequest, match=r"^api_key: ") as refused:
        Client("127.0.0.1:9", api_key=wrong)
    assert wrong not in refused.value.message


KINDS: dict[str, tuple[str, Callable[[Client], Any]]] = {
    "a time": ("timeout_s", lambda c: c.generate("a", options=CallOptions(timeout_s="5"))),
    "a rank": ("priority", lambda c: c.generate("a", options=CallOptions(priority="high"))),
    "a name": ("request_id", lambda c: c.generate("a", options=CallOptions(request_id=5))),
    "a model": ("model", lambda c: c.generate("a", options=CallOptions(model=5))),
    "a switch": ("echo", lambda c: c.generate("a", options=CallOptions(echo="yes"))),
    "variables": ("template", lambda c: c.chat("a", options=CallOptions(template="yes"))),
    "tools": ("tools", lambda c: c.chat("a", options=CallOptions(tools=5))),
    "options": ("options", lambda c: c.generate("a", options={"timeout_s": 5})),
    "pooled options": ("options", lambda c: c.embed("a", options={"timeout_s": 5})),
    "params": ("params", lambda c: c.generate("a", {"temperature": 0})),
    "no prompt": ("prompt", lambda c: c.generate(None)),
    "a number": ("prompt", lambda c: c.generate(5)),
    "bytes": ("prompt", lambda c: c.generate(b"a")),
    "a mask": ("prompt[0]", lambda c: c.generate([True, False])),
    "a mask to read": ("token_ids[1]", lambda c: c.detokenize([1, False])),
    "a mask to pool": ("inputs[0]", lambda c: c.embed([True])),
    "texts": ("token_ids", lambda c: c.generate(["a", "b"])),
    "a message": ("messages", lambda c: c.chat({"role": "user", "content": "a"})),
    "calls": (
        "messages[0].tool_calls",
        lambda c: c.chat([{"role": "assistant", "tool_calls": 5}]),
    ),
    "a prefix": ("prefix", lambda c: c.infill(5, "a")),
    "ids": ("token_ids", lambda c: c.detokenize(5)),
    "an input": ("inputs", lambda c: c.embed(5)),
    "a dimension": ("dimensions", lambda c: c.embed("a", dimensions="5")),
    "one of a pair": ("pairs[0]", lambda c: c.score([("a",)])),
    "half a pair": ("right", lambda c: c.score([("a", 5)])),
    "a document": ("documents", lambda c: c.rerank("a", "abc")),
    "attempts": ("max_retries", lambda _: Client("127.0.0.1:9", max_retries="5")),
    "a key": ("api_key", lambda _: Client("127.0.0.1:9", api_key=5)),
    "an address": ("address", lambda _: Client(5)),
    "certificates": ("tls", lambda _: Client("127.0.0.1:9", tls="ca.pem")),
    "no parameters": ("params", lambda c: c.generate("a", {})),
    "no parameters of a chat": ("params", lambda c: c.chat("a", 0)),
    "no parameters of a gap": ("params", lambda c: c.infill("a", "b", "")),
    "a small switch": ("normalize", lambda c: c.embed("a", normalize=3)),
    "a large switch": ("normalize", lambda c: c.embed("a", normalize=10**30)),
    "a switch to read": ("skip_special_tokens", lambda c: c.detokenize([1], skip_special_tokens=0)),
    "a switch to write": ("add_special_tokens", lambda c: c.tokenize("a", add_special_tokens=-1)),
}


@pytest.mark.parametrize("what", KINDS)
def test_what_is_of_another_kind_is_named(what: str) -> None:
    """It failed deep within, as Python's own TypeError, or was taken for something else."""
    param, call = KINDS[what]
    with Client("127.0.0.1:9") as client, pytest.raises(InvalidRequest, match="type") as refused:
        call(client)
    assert refused.value.param == param


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_fewer_attempts_than_none_are_refused(kind: type[Client | AsyncClient]) -> None:
    """They were counted down for ever: each call was sent until the server took it."""

    async def made() -> None:  # of the one for asyncio there is none without its loop
        kind("127.0.0.1:9", max_retries=-1)

    with pytest.raises(InvalidRequest, match="max_retries is -1; pass 0") as refused:
        asyncio.run(made())
    assert refused.value.param == "max_retries"


def test_control_what_stands_for_the_default_is_taken() -> None:
    unset = CallOptions()
    assert CallOptions(request_id=None, priority=None, timeout_s=None) == unset
    assert text_fields(numpy.array([1, 2]), None, None)["prompt"]["tokens"]["token_ids"] == [1, 2]
    assert type(CallOptions(priority=numpy.int64(3)).priority) is int


def test_a_conversation_goes_on_behind_a_line_that_is_no_text(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{LONE}\n{LONE}\n"))
    assert chat.run(["--server", "127.0.0.1:9"]) == 1
    assert capsys.readouterr().err.count("surrogates not allowed") == 2

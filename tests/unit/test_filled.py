"""Fields that no message has a place for are refused by their name."""

from __future__ import annotations

import io
import sys
from typing import Any

import pytest

from tidemill import Client, SamplingParams
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


def test_a_conversation_goes_on_behind_a_line_that_is_no_text(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{LONE}\n{LONE}\n"))
    assert chat.run(["--server", "127.0.0.1:9"]) == 1
    assert capsys.readouterr().err.count("surrogates not allowed") == 2

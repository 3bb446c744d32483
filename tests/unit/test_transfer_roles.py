"""Which engines take which requests, which go together, and what a turn of the core moves."""

from __future__ import annotations

from typing import Any

import pytest

from engine_service.core.control import TRANSFERRING_S, Ask, ControlDesk
from engine_service.core.handoff import (
    EndTransfer,
    KvSource,
    TransferAsk,
)
from engine_service.core.messages import Submit
from engine_service.core.params import DecodingChoice, PoolChoice, SamplingParams
from engine_service.server.convert_transfer import check_connector, check_role
from frontend.fleet.same_model import common_facts
from frontend.messages import EngineFacts
from tidemill.runtime.errors import (
    EngineDead,
    FailedPrecondition,
    ServiceError,
    Unsupported,
)
from tidemill.v1 import engine_pb2 as pb


def submit(**fields: Any) -> Submit:
    sampling, decoding = SamplingParams(), DecodingChoice()
    return Submit(key=1, request_id="1", prompt=b"", sampling=sampling, decoding=decoding, **fields)


SOURCE = {"kv_source": KvSource("host:1")}


@pytest.mark.parametrize(
    ("role", "fields", "refusal"),
    [
        ("both", {}, None),
        ("both", SOURCE, Unsupported),
        ("decode", {}, None),
        ("decode", SOURCE, None),
        ("prefill", {}, FailedPrecondition),
        ("prefill", SOURCE, FailedPrecondition),
        ("prefill", {"only_prefills": True}, None),
        ("prefill", {"pool": PoolChoice(task=1)}, None),
    ],
)
def test_roles(role: str, fields: dict[str, Any], refusal: type[ServiceError] | None) -> None:
    if refusal is None:
        check_role(role, submit(**fields))
        return
    with pytest.raises(refusal, match=f"--role {role}"):
        check_role(role, submit(**fields))


@pytest.mark.parametrize(
    ("connector", "asked", "goes_shared"),
    [
        ("auto", "here", True),
        ("auto", "there", False),
        ("auto", "", False),
        ("grpc", "here", False),
        ("grpc", "", False),
        ("shm", "here", True),
        ("shm", "there", None),
        ("shm", "", None),
    ],
)
def test_who_gets_shared_memory(connector: str, asked: str, goes_shared: bool | None) -> None:
    opened = pb.TransferOpen(shared_host=asked)
    if goes_shared is not None:
        assert check_connector(opened, connector, "here") is goes_shared
        assert not check_connector(opened, "auto", "")
        return
    with pytest.raises(FailedPrecondition, match="--kv-connector is shm here") as caught:
        check_connector(opened, connector, "here")
    assert caught.value.reason == "KV_SHARED"


def facts(role: str, **fields: Any) -> EngineFacts:
    base: dict[str, Any] = {
        "instance_id": role,
        "model_id": "m",
        "max_model_len": 64,
        "vocab_size": 8,
        "max_logprobs": 1,
        "tokenizer_sha256": "t",
        "default_method": "autoregressive",
        "methods": ("autoregressive",),
        "block_length": 1,
        "mask_token_id": None,
        "eos_token_ids": (),
        "page_size": 16,
        "weight_version": "w",
        "dtype": "float32",
        "role": role,
    }
    return EngineFacts(**{**base, **fields})


@pytest.mark.parametrize(
    ("field", "value"),
    [("page_size", 64), ("dtype", "bfloat16"), ("weight_version", "v"), ("block_length", 4)],
)
def test_a_pair_has_the_same_pages(field: str, value: Any) -> None:
    common_facts(facts("prefill"), {"a:1": facts("decode")})
    with pytest.raises(FailedPrecondition, match=f"{field} is {value!r}, and that of a:1 is") as no:
        common_facts(facts("prefill", **{field: value}), {"a:1": facts("decode")})
    assert no.value.reason == "KV_LAYOUT"
    # Nobody moves pages between these.
    common_facts(facts("prefill", **{field: value}), {"a:1": facts("both")})


def test_a_turn_moves_pages_for_a_bounded_time() -> None:
    now, taken = [0.0], []

    class Pages:
        def take(self, ask: TransferAsk) -> int:
            taken.append(ask)
            now[0] += TRANSFERRING_S / 2
            if len(taken) == 5:
                raise FailedPrecondition("gone", reason="NO_TRANSFER")
            return len(taken)

    class Still:
        is_still = False

    desk = ControlDesk(Still(), None, Pages(), lambda: now[0])  # type: ignore[arg-type]
    for ticket in range(5):
        desk.take(Ask(ticket, EndTransfer(ticket)))
    assert not taken
    for tickets in ([0, 1], [2, 3], [4]):
        assert desk.has_work
        answers = desk.answers()
        assert [one.ticket for one in answers] == tickets
    assert answers[0].error is not None
    assert not desk.has_work
    without = ControlDesk(Still(), None)  # type: ignore[arg-type]
    without.take(Ask(1, EndTransfer(1)))
    (refused,) = without.answers()
    assert refused.error is not None
    assert refused.error.reason == "WRONG_ROLE"


def test_a_rank_that_is_lost_over_a_transfer_is_no_failed_transfer() -> None:
    class Pages:
        def take(self, ask: TransferAsk) -> None:
            raise EngineDead("rank 1 was killed")

    class Still:
        is_still = False

    desk = ControlDesk(Still(), None, Pages())  # type: ignore[arg-type]
    desk.take(Ask(1, EndTransfer(1)))
    with pytest.raises(EngineDead, match="rank 1 was killed"):
        desk.answers()

"""Which engines take which requests, which go together, and what a turn of the core moves."""

from __future__ import annotations

import gc
import os
from contextlib import suppress
from typing import Any

import pytest

from engine_service.core.control import TRANSFERRING_S, Ask, ControlDesk
from engine_service.core.handoff import (
    MAX_ON_THE_WAY,
    EndTransfer,
    InlinePiece,
    KvSource,
    SharedPiece,
    TransferAsk,
    most_on_the_way,
)
from engine_service.core.messages import Submit
from engine_service.core.params import DecodingChoice, PoolChoice, SamplingParams
from engine_service.pieces import Files, fetch, inlined
from engine_service.server.convert_transfer import check_connector
from engine_service.server.transfer_in import check_role
from frontend.fleet.same_model import common_facts
from frontend.messages import EngineFacts
from tidemill.runtime.errors import (
    EngineDead,
    FailedPrecondition,
    ServiceError,
    Unavailable,
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


def offered(files: Files, transfer: int, content: bytes, told: int | None = None) -> SharedPiece:
    def fill(place: memoryview) -> None:
        place[:] = content

    return files.offer(transfer, len(content), fill, told)


def test_pieces_bring_what_was_offered() -> None:
    files = Files()
    contents = [bytes([n] * (20_000 - 999 * n)) for n in range(1, MAX_ON_THE_WAY + 2)]
    pieces = [offered(files, 7, one) for one in contents]
    for content, piece in list(zip(contents, pieces, strict=True))[1:]:
        into = bytearray(len(content))
        fetch(piece, memoryview(into))
        assert bytes(into) == content
        assert inlined(piece) == InlinePiece(content, piece.crc32)
    # The file of the first is used again by the one that ends its time.
    late = inlined(pieces[0])
    for read in (pieces[0], offered(files, 8, late.content, late.crc32)):
        with pytest.raises(FailedPrecondition, match="changed on their way") as caught:
            fetch(read, memoryview(bytearray(len(contents[0]))))
        assert caught.value.reason == "KV_PIECE"
    short = SharedPiece(os.getpid(), pieces[1].fd, 30_000, 0)
    with pytest.raises(FailedPrecondition, match=r"it ends after \d+ of 30000 bytes") as caught:
        fetch(short, memoryview(bytearray(30_000)))
    assert caught.value.reason == "KV_SHARED"
    with pytest.raises(Unavailable, match=r"rank 0 has gone.* it ends after \d+ of 30000") as gone:
        inlined(short)
    assert gone.value.reason == "KV_OWN"
    with pytest.raises(FailedPrecondition, match="cannot read shared KV") as caught:
        fetch(SharedPiece(1, 0, 1000, 0), memoryview(bytearray(1000)))
    assert caught.value.reason == "KV_SHARED"
    told = offered(files, 7, b"abc", pieces[0].crc32)
    with pytest.raises(FailedPrecondition, match="changed on their way"):
        fetch(told, memoryview(bytearray(3)))
    files.end(7)
    files.end(7)
    with pytest.raises(FailedPrecondition, match="3 bytes of KV came for pages of 4"):
        fetch(told, memoryview(bytearray(4)))


def shared_files() -> set[str]:
    """Descriptors of such files; those of other tests may close meanwhile."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the listing itself
            if "tidemill-kv" in os.readlink(f"/proc/self/fd/{number}"):
                found.add(number)
    return found


def test_shared_files_are_used_again_and_few_are_kept() -> None:
    gc.collect()
    before = shared_files()
    shared = Files()
    for transfer in range(3):
        for size in [3000] * MAX_ON_THE_WAY + [2000]:
            offered(shared, transfer, bytes(size))
    assert len(shared._used) == 3
    for transfer in range(3):
        shared.end(transfer)
    assert not shared._used
    kept = {file.number for file in shared._idle}
    assert len(kept) == MAX_ON_THE_WAY
    # Python's mapping of a file has a descriptor of its own.
    assert len(shared_files() - before) == 2 * MAX_ON_THE_WAY
    again = [offered(shared, 4, bytes(2500)).fd for _ in kept]
    assert set(again) == kept
    larger = offered(shared, 5, bytes(3001))
    into = memoryview(bytearray(3001))
    fetch(larger, into)
    shared.end(4)
    shared.end(5)
    del shared
    assert shared_files() == before
    with pytest.raises(FailedPrecondition, match="cannot read shared KV"):
        fetch(larger, into)


@pytest.mark.parametrize(
    ("piece_bytes", "most"), [(1, MAX_ON_THE_WAY), (2 << 20, 8), (5 << 20, 3), (1 << 30, 2)]
)
def test_large_pieces_hold_few_files(piece_bytes: int, most: int) -> None:
    """A window of host memory a transfer, and as much when nobody transfers anything."""
    assert most_on_the_way(piece_bytes) == most
    if piece_bytes > 8 << 20:
        return
    files = Files()
    for transfer in range(2):
        for _ in range(most + 2):
            files.offer(transfer, piece_bytes, lambda place: None, 0)
        assert len(files._used[transfer]) == most
    assert len(files._idle) <= most
    for transfer in range(2):
        files.end(transfer)
    assert len(files._idle) == most

"""Ranks that share a model compute on devices of one kind, or are told which differ."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from engine_service import distributed
from engine_service.device_kinds import CPU, check_kinds, kind_of
from engine_service.distributed import meet
from engine_service.place import Place
from tidemill.runtime.errors import FailedPrecondition

H200, A100 = "NVIDIA H200 (...)", "NVIDIA A100 (...)"
WAIT_S = 20.0


def test_ranks_of_one_stage_have_one_kind() -> None:
    check_kinds([CPU, CPU], 1)
    check_kinds([H200] * 4, 2)
    check_kinds([H200, H200, A100, A100], 2)
    with pytest.raises(FailedPrecondition, match=r"rank 0 computes on NVIDIA H200.* rank 2 on NVI"):
        check_kinds([H200, H200, A100, A100], 1)
    with pytest.raises(FailedPrecondition, match=r"rank 2 computes on NVIDIA A100.* rank 3 on NVI"):
        check_kinds([H200, H200, A100, H200], 2)


def test_no_stage_is_on_the_cpu_beside_one_on_a_gpu() -> None:
    with pytest.raises(FailedPrecondition, match=r"rank 1 on the CPU, but .* all on GPUs or all"):
        check_kinds([H200, CPU], 2)


def test_the_cpu_is_one_kind() -> None:
    assert kind_of(torch.device("cpu")) == CPU


def test_all_ranks_are_refused_before_they_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """None is left in a collective that another one does not come to."""
    kinds = {"0": H200, "1": CPU}
    monkeypatch.setattr(
        distributed, "kind_of", lambda device: kinds[threading.current_thread().name]
    )
    short = timedelta(seconds=WAIT_S)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=short)
    place = ("127.0.0.1", store.port)
    told: dict[str, str] = {}

    def join(rank: int) -> None:
        try:
            meet(Place(rank, 2, place, rank), torch.device("cpu"), None if rank else store)
        except FailedPrecondition as refusal:
            told[str(rank)] = refusal.message

    threads = [threading.Thread(target=join, args=(rank,), name=str(rank)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert told["0"] == told["1"]
    assert "rank 0 computes on NVIDIA H200 (...) and rank 1 on the CPU" in told["0"]
    assert not torch.distributed.is_initialized()

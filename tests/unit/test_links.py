"""What stages say to each other, without anybody who hears it; devices are played."""

from __future__ import annotations

import threading
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from engine_service import distributed, stages
from engine_service.distributed import abort_all, meet
from engine_service.place import Place
from engine_service.stages import Links, Stage
from engine_service.worker import memory
from engine_service.worker.memory import find_room

CPU = torch.device("cpu")


class Work:
    """A message on its way; it raises what became of its connection."""

    def __init__(self, fault: str = "") -> None:
        self._fault = fault

    def wait(self) -> None:
        if self._fault:
            raise RuntimeError(self._fault)


def play(monkeypatch: pytest.MonkeyPatch, rank: int, fault: str = "") -> Counter[Any]:
    """Groups are numbered; returns the messages (from, to, group) of this rank."""
    said: Counter[Any] = Counter()

    def isend(tensor: torch.Tensor, to: int, group: Any) -> Work:
        said[rank, to, group] += 1
        return Work(fault)

    def irecv(into: torch.Tensor, source: int, group: Any) -> Work:
        said[source, rank, group] += 1
        return Work()

    monkeypatch.setattr(dist, "new_group", lambda *args, **named: "back")
    monkeypatch.setattr(dist, "isend", isend)
    monkeypatch.setattr(dist, "irecv", irecv)
    return said


@pytest.mark.parametrize(("num_ranks", "num_stages"), [(2, 2), (3, 3), (6, 3), (4, 2)])
def test_a_greeting_goes_once_over_every_channel(
    num_ranks: int, num_stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    size, channels = num_ranks // num_stages, Counter[Any]()
    for rank in range(num_ranks):
        said = play(monkeypatch, rank)
        Links(rank, num_ranks, num_stages=num_stages, device=CPU).greet()
        channels += said
    wanted = [(rank, rank + size, None) for rank in range(num_ranks - size)]
    last = num_ranks - size
    wanted += [(last + rank % size, rank, "back") for rank in range(last)]
    assert channels == Counter(dict.fromkeys(wanted, 2)), "not sent and received once"


def test_a_rank_may_leave_others_that_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch, 0, fault="Connection closed by peer")
    links = Links(0, 2, num_stages=2, device=CPU)
    for _ in range(3):
        links.pass_on(torch.zeros(2))
    assert links.flush()


@pytest.mark.parametrize("is_done", [True, False])
def test_a_device_that_waits_for_ever_is_waited_for_in_bounds(
    is_done: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    play(monkeypatch, 0)
    stream = SimpleNamespace(wait_stream=lambda other: None)
    recorded: list[Any] = []
    event = SimpleNamespace(record=recorded.append, query=lambda: is_done)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(stages, "_LEAVING_S", 0.05)
    links = Links(0, 2, num_stages=2, device=torch.device("cuda", 0))
    assert links.flush() == is_done
    assert recorded == [stream], "of its own device, whatever the thread's is"


class Aborted:
    """A group of the library that ends only when all others end too."""

    def __init__(self, all_of_them: threading.Barrier) -> None:
        self._all = all_of_them
        self.has_ended = False

    def abort(self) -> None:
        self._all.wait(10.0)
        self.has_ended = True


def test_every_group_of_a_pipeline_is_aborted_and_all_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The world, the ranks of one stage, and what the last stage tells by; not the other stage's,
    which this rank is not in."""
    barrier = threading.Barrier(3)
    groups = [Aborted(barrier) for _ in range(4)]
    made = iter(groups[1:])
    monkeypatch.setattr(distributed, "_ON_DEVICES", set())
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **named: None)
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=groups[0]))
    monkeypatch.setattr(dist, "new_group", lambda *args, **named: next(made))
    monkeypatch.setattr(Links, "greet", lambda self: None)
    monkeypatch.setattr(distributed, "_kinds_of_all", lambda place, *_: ["the CPU"] * place.size)
    meet(Place(0, 4), CPU, dist.HashStore(), num_stages=2)
    abort_all(waits=True)
    assert [one.has_ended for one in groups] == [True, True, False, True]


def test_hidden_states_in_flight_are_set_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that is all free, and steps that take nothing."""
    for name in ("reset_peak_memory_stats", "synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    for name in ("memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (1 << 30, 1 << 30))
    monkeypatch.setattr(memory, "rehearse", lambda *_: None)
    size = SimpleNamespace(
        token_budget=1000, logit_chunk=8, logit_budget=8, table_width=64, max_rows=4
    )
    model: Any = SimpleNamespace(
        traits=SimpleNamespace(mask_block=1, logits_shift=1, hidden_size=8)
    )
    backend: Any = SimpleNamespace(shape=SimpleNamespace(dtype=torch.bfloat16))
    config: Any = SimpleNamespace(memory_fraction=1.0)

    def taken(stage: Stage) -> int:
        device = torch.device("cuda", 0)
        room = find_room(config, size, model, backend, device, (), stage)  # type: ignore[arg-type]
        return (1 << 30) - room.available_bytes

    step = 1000 * 8 * 2
    assert taken(Stage()) == 0
    assert taken(Stage(0, 2)) == 4 * step, "passed on"
    assert taken(Stage(1, 2)) == 2 * step, "received"
    assert taken(Stage(1, 3)) == 9 * step, "both"

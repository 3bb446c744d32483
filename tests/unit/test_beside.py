"""Sums in chunks: what is launched where, and which products leave room for them; without a device.
Their numbers are compared on GPUs (tests/gpu/peer_sums.py)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from engine_service import beside
from engine_service.beside import BesideSums, Summed
from engine_service.kernels.peer_sum import Parts

ROWS, WIDTH = 5000, 8
CHUNKS = [slice(0, 1280), slice(1280, 2560), slice(2560, 3840), slice(3840, 5000)]


class Machine:
    """Streams, the library's target and the kernel that adds, which write down what they do."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.leaves = False
        monkeypatch.setattr(torch.cuda, "Stream", lambda *_, **__: self)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self)
        monkeypatch.setattr(torch.cuda, "stream", self._aside)
        monkeypatch.setattr(beside, "_leaving", self._leaving)
        monkeypatch.setattr(beside, "add_parts_rounds_triton", self._add)

    def wait_stream(self, other: object) -> None:
        self.log.append(("wait",))

    def record_event(self) -> Machine:
        return self

    def wait(self) -> None:
        self.log.append(("take",))

    @contextmanager
    def _aside(self, stream: object) -> Iterator[None]:
        yield

    @contextmanager
    def _leaving(self) -> Iterator[None]:
        self.leaves = True
        yield
        self.leaves = False

    def _add(self, residual: torch.Tensor, parts: Parts, *_: object, **how: Any) -> None:
        assert len(residual) == len(parts.parts[0]) == len(how["normed_TE"])
        self.log.append(("add", len(residual), how["most_sms"]))

    def make(self, rows: slice, room: torch.Tensor | None) -> torch.Tensor:
        assert room is not None
        self.log.append(("make", rows, self.leaves))
        return room


def add(machine: Machine, in_pieces: bool) -> Summed:
    part = torch.zeros(ROWS, WIDTH)
    site = Parts((part, part, part), (), part, part)
    sums = BesideSums(0, [site], torch.device("cpu"))
    norm = torch.ones(WIDTH), 1e-6
    return sums.add(0, torch.zeros(ROWS, WIDTH), machine.make, norm, in_pieces=in_pieces)


def test_each_chunk_is_added_beside_the_product_of_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = Machine(monkeypatch)
    normed, pieces = add(machine, in_pieces=False)
    assert normed is not None
    assert not pieces
    few = beside._NUM_SMS
    assert machine.log == [
        *[("make", CHUNKS[0], False), ("wait",), ("add", 1280, few)],
        *[("make", CHUNKS[1], True), ("wait",), ("add", 1280, few)],
        *[("make", CHUNKS[2], True), ("wait",), ("add", 1280, few)],
        *[("make", CHUNKS[3], True), ("wait",), ("add", 1160, None)],
        ("wait",),
    ]


def test_the_first_piece_comes_ahead_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """And only what reads it leaves room; the last chunk leaves room too, as something is beside
    it."""
    machine = Machine(monkeypatch)
    _, pieces = add(machine, in_pieces=True)
    assert [entry[-1] for entry in machine.log if entry[0] == "add"] == [beside._NUM_SMS] * 4
    assert machine.log[-1][0] == "add", "nobody has waited yet"
    assert [piece.rows for piece in pieces] == [CHUNKS[0], slice(CHUNKS[1].start, ROWS)]
    assert [piece.is_last for piece in pieces] == [False, True]
    left = []
    for piece in pieces:
        with piece.taken():
            assert machine.log[-1] == ("take",)
            left.append(machine.leaves)
    assert left == [True, False]

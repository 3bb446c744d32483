"""Ranks that have a share of the vocabulary each: they decide what one rank does from all of it."""

from __future__ import annotations

import dataclasses
import math
import random
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn import functional

from engine_service.distributed import Group
from engine_service.kernels.confidence import Confidence, TileParts
from engine_service.kernels.streams import Streams
from engine_service.kernels.vocab_share import VocabShare
from engine_service.kernels.vocab_tiles import TILE
from engine_service.layers.slots import Share
from engine_service.sampling import sampler
from engine_service.sampling.batch import DecideBatch
from engine_service.sampling.head import HeadLogits
from engine_service.sampling.sampler import choose, choose_with_confidence
from tests.sampling_batches import Row, make_batch, on_device

device = "cuda" if torch.cuda.is_available() else "cpu"
BANNED = (3, 40)


class Meeting:
    """What ranks, each a thread here, join: [N, C] of every one to [N, size * C]. One computes at a
    time, because Triton's interpreter knows one program."""

    def __init__(self, size: int) -> None:
        self.pieces: list[torch.Tensor] = [torch.empty(0)] * size
        self.computing = threading.Lock()
        self._barrier = threading.Barrier(size, timeout=30.0)

    def join(self, rank: int, piece: torch.Tensor) -> torch.Tensor:
        self.pieces[rank] = piece
        self._wait()
        whole = torch.cat(self.pieces, dim=1)
        self._wait()
        return whole

    def _wait(self) -> None:
        self.computing.release()
        try:
            self._barrier.wait()
        finally:
            self.computing.acquire()


class Head:
    """A rank's rows of an output head, padded to the room that all ranks have."""

    def __init__(self, weight_VE: torch.Tensor, rank: int, meeting: Meeting) -> None:
        size = len(meeting.pieces)
        ids = Share.rounded_up(len(weight_VE), Group(rank, size))
        self.weight = weight_VE.new_zeros(-(-len(weight_VE) // size), weight_VE.shape[1])
        self.weight[: ids.size] = weight_VE[ids.slice]
        self.vocab = len(weight_VE)
        self.vocab_share = VocabShare(ids.start, ids.size, partial(meeting.join, rank))

    def own_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return functional.linear(hidden, self.weight)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.vocab_share.join(self.own_logits(hidden))[:, : self.vocab]

    def head_factors(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return hidden, self.weight


class Whole(Head):
    """All of it on one rank."""

    def __init__(self, weight_VE: torch.Tensor) -> None:
        self.weight, self.vocab = weight_VE, len(weight_VE)
        self.vocab_share = None  # type: ignore[assignment]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.own_logits(hidden)


def on_ranks(size: int, decide: Callable[[int, Meeting], Any]) -> list[Any]:
    """What every rank gets."""
    meeting, found = Meeting(size), [None] * size

    def run(rank: int) -> None:
        with meeting.computing:
            found[rank] = decide(rank, meeting)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert None not in found
    return found


def make(vocab: int, rows: list[Row]) -> Any:
    """A batch of whole numbers, many of them equal, and (hidden, weight) of its logits; the first
    row's are all -inf."""
    hidden = torch.randint(-2, 3, (len(rows), 8)).float()
    weight = torch.randint(-2, 3, (vocab, 8)).float()
    hidden[:, 0], weight[:, 0] = 0.0, 2e38
    hidden[0] = torch.tensor([-10.0] + 7 * [0.0])
    batch = make_batch(functional.linear(hidden, weight), rows, banned=BANNED)
    return on_device(batch, device), hidden.to(device), weight.to(device)


def with_head(batch: DecideBatch, head: Head, hidden: torch.Tensor) -> DecideBatch:
    return dataclasses.replace(batch, logits=HeadLogits(head, hidden))


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The way of CUDA, which the interpreter can go on the CPU too."""
    monkeypatch.setattr(sampler, "runs_triton", lambda x: True)


VOCABS = [(2, 100), (2, 2 * TILE + 7), (3, 50), (4, 4 * TILE + 1), (4, 101)]


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(("size", "vocab"), VOCABS)
@pytest.mark.parametrize("decide", [choose, choose_with_confidence])
def test_ranks_decide_as_one(size: int, vocab: int, decide: Any, seed: int) -> None:
    """Of equal logits the lowest id wins, whichever rank has it."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    rows = [Row(temperature=rng.choice((0.0, 0.8)), seed=rng.getrandbits(60)) for _ in range(6)]
    batch, hidden, weight = make(vocab, rows)
    draws = torch.zeros_like(batch.rows)
    want = decide(with_head(batch, Whole(weight), hidden), draws)

    def on_rank(rank: int, meeting: Meeting) -> Any:
        return decide(with_head(batch, Head(weight, rank, meeting), hidden), draws)

    for found in on_ranks(size, on_rank):
        check(found, want)


def check(found: Any, want: Any) -> None:
    if isinstance(want, Confidence):
        assert torch.equal(found.token_ids, want.token_ids)
        for one, other in zip(found[1:], want[1:], strict=True):
            torch.testing.assert_close(one, other)
    else:
        assert torch.equal(found, want)


@pytest.mark.parametrize("decide", [choose, choose_with_confidence])
def test_without_kernels_ranks_look_at_whole_logits(decide: Any, seed: int) -> None:
    """Also on a device on which kernels do not run: nobody decides from its own ids alone."""
    torch.manual_seed(seed)
    rows = [Row(temperature=temperature, seed=9) for temperature in (0.0, 0.8, 0.0)]
    batch, hidden, weight = make(90, rows)
    draws = torch.zeros_like(batch.rows)
    want = decide(with_head(batch, Whole(weight), hidden), draws)

    def on_rank(rank: int, meeting: Meeting) -> Any:
        return decide(with_head(batch, Head(weight, rank, meeting), hidden), draws)

    for found in on_ranks(2, on_rank):
        check(found, want)


@pytest.mark.parametrize("ahead", [0.0, float("nan")])
def test_a_rank_without_ids_reads_nothing_ahead_of_its_logits(ahead: float) -> None:
    """Nine ids on four ranks are three, three, three and none, in pieces of three columns."""
    line = torch.zeros(16, device=device)
    line[7] = ahead
    none, drawn = (torch.zeros(1, dtype=torch.int64, device=device) for _ in range(2))
    streams = Streams(none, none, none, torch.ones(1, device=device), drawn, 0)
    parts = TileParts(1, 3, line.device, VocabShare(9, 0, lambda sums: sums))
    parts.add(line[8:11].view(1, 3), 0, None, streams)
    score, chosen, best, second, *_ = parts._split(parts._tiles)[1].flatten().tolist()
    assert {score, chosen, best, second} == {-math.inf}

"""Runs client processes together and joins what they saw. It does not know requests."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

from tidemill.bench.traffic.answer import Answer
from tidemill.bench.traffic.client import Outcome, Share, Told, run_client, shares

_LEAD_S = 0.1
"""Between the word to begin and the beginning, so that it reaches every process before."""


class Ran(NamedTuple):
    """A run that is over; `began` is CLOCK_MONOTONIC."""

    began: float
    answers: list[Answer]
    cpu_share: float
    """Cores that the busiest client process took."""


def run_clients(
    whole: Share, count: int, on_progress: Callable[[Told], None] = lambda _: None
) -> Ran:
    """The work of `whole` in `count` processes, or as many as have any. Raises RuntimeError when
    one of them fails."""
    count = max(1, min(count, whole.streams or len(whole.starts)))
    context = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        pipes = []
        for share in shares(whole, count):
            ours, theirs = context.Pipe()
            client = context.Process(target=run_client, args=(share, theirs), daemon=True)
            client.start()
            theirs.close()
            stack.callback(client.join)
            stack.callback(client.terminate)
            stack.callback(ours.close)
            pipes.append(ours)
        for pipe in pipes:
            _heard(pipe)
        began = time.monotonic() + _LEAD_S
        for pipe in pipes:
            pipe.send(began)
        outcomes = _listen(pipes, on_progress)
    answers = [answer for outcome in outcomes for answer in outcome.answers]
    return Ran(began, answers, max(outcome.cpu_share for outcome in outcomes))


def _listen(pipes: list[Connection], on_progress: Callable[[Told], None]) -> list[Outcome]:
    told, outcomes, running = {}, [], set(pipes)
    while running:
        for pipe in wait(running):
            assert isinstance(pipe, Connection)
            news = _heard(pipe)
            if isinstance(news, Outcome):
                outcomes.append(news)
                running.remove(pipe)
            else:
                told[pipe] = news
        if told:
            on_progress(Told(*map(sum, zip(*told.values(), strict=True))))
    return outcomes


def _heard(pipe: Connection) -> Any:
    try:
        return pipe.recv()
    except EOFError:
        raise RuntimeError("a client process failed; its reason is above") from None

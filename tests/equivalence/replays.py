"""Which graphs are replayed; and CUDA graphs without a GPU: what one would replay is computed anew,
on the tensors it was captured with."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine_service import staging
from engine_service.sampling.batch import DecideResult, Wants
from engine_service.worker.buckets import FILTERED, PLAIN
from engine_service.worker.graphs import StepGraphs


def watch_choices(graphs: StepGraphs) -> list[Wants | None]:
    """What the graphs of deciding buckets decide for that are replayed from now on; None: of one
    that ends ahead of its decision."""
    replayed: list[Wants | None] = []
    for captured in graphs._captured.values():
        for choice, whole in captured.wholes.items():
            _watch(whole.graph, choice, replayed)
        _watch(captured.to_states, None, replayed)
    return replayed


def _watch(graph: Any, choice: Wants | None, replayed: list[Wants | None]) -> None:
    replay = graph.replay
    graph.replay = lambda: replayed.append(choice) or replay()


def filter_as_plain(graphs: StepGraphs) -> None:
    """For controls: filtered rows are decided by the graphs of those that have no filters."""
    for captured in graphs._captured.values():
        captured.wholes[FILTERED] = captured.wholes[PLAIN]


def replay_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every StepGraphs made from now on does so."""
    monkeypatch.setattr(StepGraphs, "_record", _record)
    monkeypatch.setattr(staging, "_packed", _packed)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)


def _record(self: StepGraphs, work: Any) -> tuple[Any, Any]:
    made = work()

    @torch.inference_mode()
    def replay() -> None:
        again = work()
        if isinstance(made, DecideResult):
            _overwrite(made, again)

    return SimpleNamespace(replay=replay, reset=lambda: None), made


def _overwrite(result: DecideResult, by: DecideResult) -> None:
    """Where a graph has left its decision, the next replay leaves another."""
    for field in fields(result):
        where, what = getattr(result, field.name), getattr(by, field.name)
        assert (where is None) == (what is None), field.name
        if where is not None:
            where.copy_(what)


def _packed(arrays: Any) -> torch.Tensor:
    buffer = torch.zeros(staging.Arena.size_of(arrays), dtype=torch.uint8)
    for window, array in zip(staging._windows(buffer, arrays), arrays, strict=True):
        window.copy_(torch.from_numpy(array))
    return buffer

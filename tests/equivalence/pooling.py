"""Pooled requests on an engine in this process, and the slow reference they are compared with."""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine_service.composition import Engine, compose
from engine_service.config import EngineConfig
from engine_service.core.messages import Finish, Submit
from engine_service.core.params import DecodingChoice, PoolChoice, SamplingParams
from engine_service.core.step import StepPlan


def make_engine(folder: Path, **flags: object) -> Engine:
    settings = {"device": "cpu", "max_rows": 4, "max_model_len": 96, **flags}
    return compose(EngineConfig(model=str(folder), **settings), lambda *stage: None)


def submit(
    engine: Engine, key: int, prompt: Sequence[int], pool: PoolChoice | None, max_tokens: int = 8
) -> None:
    """A prompt to pool, or without `pool` to go on with greedily."""
    sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=max_tokens)
    engine.scheduler.submit(
        Submit(
            key=key,
            request_id=str(key),
            prompt=struct.pack(f"<{len(prompt)}I", *prompt),
            sampling=sampling if pool is None else SamplingParams(),
            decoding=DecodingChoice(),
            pool=pool,
        )
    )


class Outcome:
    """What came out of a run."""

    def __init__(self, *, overlaps: bool = False) -> None:
        self.depth = int(overlaps)
        """Steps that are launched before the one ahead of them is collected."""
        self.flights: deque[tuple[StepPlan, Any]] = deque()
        self.tokens: dict[int, list[int]] = {}
        self.finishes: dict[int, Finish] = {}
        self.num_steps = 0

    def vector(self, key: int) -> np.ndarray:
        return np.frombuffer(self.finishes[key].vector, dtype="<f4")


def run(engine: Engine, outcome: Outcome | None = None, *, max_steps: int = 2000) -> Outcome:
    """Steps until everything is answered."""
    outcome = outcome or Outcome()
    for _ in range(max_steps):
        step(engine, outcome)
        if not engine.scheduler.has_work:
            break
    assert not engine.scheduler.has_work
    assert engine.scheduler.load.pages_used == 0
    return outcome


def step(engine: Engine, outcome: Outcome) -> None:
    plan = engine.scheduler.schedule()
    if plan is not None:
        outcome.num_steps += 1
        outcome.flights.append((plan, engine.executor.launch(plan)))
    if outcome.flights and (plan is None or len(outcome.flights) > outcome.depth):
        oldest, handle = outcome.flights.popleft()
        engine.scheduler.apply(oldest, engine.executor.collect(handle))
    engine.scheduler.check_integrity()
    output = engine.scheduler.emit()
    if output is None:
        return
    tokens = iter(struct.unpack(f"<{len(output.token_ids) // 4}I", output.token_ids))
    for key, size in zip(output.keys, output.counts, strict=True):
        outcome.tokens.setdefault(key, []).extend(next(tokens) for _ in range(size))
    for row, finish in output.finished:
        outcome.finishes[output.keys[row]] = finish


def pool_reference(
    states: torch.Tensor, kind: str, *, normalize: bool = True, dimensions: int | None = None
) -> np.ndarray:
    """Of the [T, E] last hidden states of one prompt."""
    pooled = {"mean": states.mean(0), "last": states[-1], "cls": states[0]}[kind]
    pooled = pooled[:dimensions]
    return (pooled / pooled.norm() if normalize else pooled).numpy()

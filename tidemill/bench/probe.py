"""Looks at a running engine from outside: how long its calls take, what they return, how full its
pages are.

It replaces methods of the engine's parts by watched ones and puts them back; the parts do not know.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine_service.composition import Engine
    from engine_service.core.messages import StepOutput, Submit


@contextmanager
def replaced(owner: object, name: str, wrap: Callable[[Any], Any]) -> Iterator[None]:
    """`owner.name` is `wrap(owner.name)` inside the block."""
    own = vars(owner).get(name)
    setattr(owner, name, wrap(getattr(owner, name)))
    try:
        yield
    finally:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)


@contextmanager
def timed(owner: object, name: str, spent: list[float]) -> Iterator[None]:
    """Adds the seconds of every call of `owner.name` to the last entry of `spent`."""

    def wrap(call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                spent[-1] += time.perf_counter() - start

        return watched

    with replaced(owner, name, wrap):
        yield


@contextmanager
def counted(owner: object, name: str) -> Iterator[list[str]]:
    """One entry per call of `owner.name`."""
    calls: list[str] = []

    def wrap(call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return call(*args, **kwargs)

        return watched

    with replaced(owner, name, wrap):
        yield calls


@dataclass(slots=True)
class KVUse:
    """Sums over the looks taken."""

    live: int = 0
    slots: int = 0

    @property
    def share(self) -> float | None:
        """Share of the KV slots in use that a live token fills, over time; None without a look."""
        return round(self.live / self.slots, 4) if self.slots else None


@contextmanager
def watch_kv(engine: Engine, *, every: int = 1) -> Iterator[KVUse]:
    """Looks at the pages after every `every`-th schedule."""
    use, scheduler, calls = KVUse(), engine.scheduler, 0
    page_size = engine.facts.page_size

    def wrap(schedule: Callable[..., Any]) -> Callable[..., Any]:
        def watched() -> Any:
            nonlocal calls
            plan, calls = schedule(), calls + 1
            if calls % every == 0:
                use.live += scheduler.live_tokens
                use.slots += scheduler.load.pages_used * page_size
            return plan

        return watched

    with replaced(scheduler, "schedule", wrap):
        yield use


@dataclass(slots=True)
class Arrivals:
    """When sequences came and when their tokens left, in `perf_counter` seconds."""

    submitted: dict[int, float] = field(default_factory=dict)
    """By the key of the sequence."""
    outputs: list[tuple[float, StepOutput]] = field(default_factory=list)

    def token_times(self) -> dict[int, list[float]]:
        """By key: one time per output that held tokens of the sequence."""
        times: dict[int, list[float]] = {key: [] for key in self.submitted}
        for when, output in self.outputs:
            for key, count in zip(output.keys, output.counts, strict=True):
                if count:
                    times[key].append(when)
        return times


@contextmanager
def watch_arrivals(engine: Engine) -> Iterator[Arrivals]:
    """Takes down every submission and output; nothing is computed before the block has ended."""
    arrivals = Arrivals()

    def wrap_submit(submit: Callable[[Submit], None]) -> Callable[[Submit], None]:
        def watched(message: Submit) -> None:
            arrivals.submitted[message.key] = time.perf_counter()
            submit(message)

        return watched

    def wrap_emit(emit: Callable[..., StepOutput | None]) -> Callable[..., StepOutput | None]:
        def watched(**kwargs: Any) -> StepOutput | None:
            output = emit(**kwargs)
            if output is not None:
                arrivals.outputs.append((time.perf_counter(), output))
            return output

        return watched

    with (
        replaced(engine.scheduler, "submit", wrap_submit),
        replaced(engine.scheduler, "emit", wrap_emit),
    ):
        yield arrivals

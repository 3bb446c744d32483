"""Who the rows of a step belong to, and what of its columns each stream gets. It does not know the
streams."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine_service.core.messages import Finish, StepOutput
from engine_service.server.outlet import TOKEN_BYTES, StepRows
from tidemill.runtime.errors import ServiceError


class Sink(Protocol):
    """Who owns the rows of a stream. Neither method may block."""

    def step(self, rows: StepRows) -> None:
        """Tokens and finishes of this stream's handles."""

    def failed(self, handle: int, error: ServiceError) -> None:
        """The one terminal event of a handle that gets no Finish."""


Ended = Callable[[Finish | ServiceError], None]


@dataclass(frozen=True, slots=True)
class Route:
    """Where the rows of one key go; `ended` is called once, with what ended it."""

    sink: Sink
    handle: int
    request_id: str
    ended: Ended


Group = tuple[Sink, list[int], Sequence[int]]
"""A stream, its handles and their rows in the step."""


def group(keys: Sequence[int], routes: Mapping[int, Route]) -> list[Group]:
    """The streams of a step. Mostly there is one, that of a frontend; keys without a route are
    nobody's."""
    try:
        found = [routes[key] for key in keys]
    except KeyError:
        known = [(row, routes[key]) for row, key in enumerate(keys) if key in routes]
    else:
        if len({id(route.sink) for route in found}) == 1:
            return [(found[0].sink, [route.handle for route in found], range(len(found)))]
        known = list(enumerate(found))
    groups: dict[int, tuple[Sink, list[int], list[int]]] = {}
    for row, route in known:
        _, handles, rows = groups.setdefault(id(route.sink), (route.sink, [], []))
        handles.append(route.handle)
        rows.append(row)
    return list(groups.values())


def select(
    output: StepOutput, handles: list[int], rows: Sequence[int], offsets: list[int]
) -> StepRows:
    """The part of a step that belongs to one stream."""
    size, tokens, counts = TOKEN_BYTES, output.token_ids, output.counts
    picked = [tokens[offsets[row] * size : offsets[row + 1] * size] for row in rows]
    sparse: dict[int, int] = {}
    tables = output.logprobs, output.prompt_logprobs, output.finished, output.canvas, output.opened
    if any(tables):
        sparse = {row: i for i, row in enumerate(rows)}
    return StepRows(
        seq=output.seq,
        handles=handles,
        counts=[counts[row] for row in rows],
        token_ids=b"".join(picked),
        logprobs=[(sparse[r], entry) for r, entry in output.logprobs if r in sparse],
        prompt_logprobs=[
            (sparse[r], at, entry) for r, at, entry in output.prompt_logprobs if r in sparse
        ],
        finished=[(sparse[r], entry) for r, entry in output.finished if r in sparse],
        canvas=[(sparse[r], shown) for r, shown in output.canvas if r in sparse],
        opened=[(sparse[r], cached) for r, cached in output.opened if r in sparse],
    )

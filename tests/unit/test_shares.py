"""Who the rows of a step belong to, and what each stream gets of its columns."""

from __future__ import annotations

import random
from itertools import accumulate

import pytest

from engine_service.core.messages import Load, StepOutput
from engine_service.server.outlet import TOKEN_BYTES, StepRows
from engine_service.server.shares import Route, group, select
from tidemill.runtime.errors import ServiceError


class Stream:
    def step(self, rows: StepRows) -> None: ...

    def failed(self, handle: int, error: ServiceError) -> None: ...


@pytest.mark.parametrize("gone", [False, True])
@pytest.mark.parametrize("num_streams", [1, 3])
def test_every_row_goes_to_its_stream(num_streams: int, gone: bool, seed: int) -> None:
    rng = random.Random(seed)
    streams = [Stream() for _ in range(num_streams)]
    keys = rng.sample(range(1000), 40)
    routes = {key: Route(rng.choice(streams), n, "", lambda _: None) for n, key in enumerate(keys)}
    if gone:
        del routes[keys[rng.randrange(40)]]
    counts = [rng.randrange(4) for _ in keys]
    tokens = rng.randbytes(sum(counts) * TOKEN_BYTES)
    step = StepOutput(1, keys, counts, tokens, [], [], [], [], Load(40, 0, 0, 1, 2))
    offsets = list(accumulate(counts, initial=0))
    got = {}
    for stream, handles, rows in group(keys, routes):
        share, at = select(step, handles, rows, offsets), 0
        for handle, count in zip(share.handles, share.counts, strict=True):
            got[id(stream), handle] = share.token_ids[at : at + count * TOKEN_BYTES]
            at += count * TOKEN_BYTES
    want = {
        (id(routes[key].sink), routes[key].handle): tokens[
            offsets[row] * TOKEN_BYTES : offsets[row + 1] * TOKEN_BYTES
        ]
        for row, key in enumerate(keys)
        if key in routes
    }
    assert got == want
    assert len(got) == 40 - gone


def test_nobody_is_left() -> None:
    assert group([1, 2], {}) == []
    assert group([], {}) == []

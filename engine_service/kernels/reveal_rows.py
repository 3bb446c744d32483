"""Where the decided positions of a span are on the device, what they hold, and what is kept of
their row. Device functions: they launch nothing and know no rules.
Shape legend: L lines of rows, T table width, N decided positions, R spans, B positions of a block.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from engine_service.kernels.jit import jit, tl


class RowStates(NamedTuple):
    """What is kept of every row; `progress` and `adapted` change."""

    rules: torch.Tensor
    """[L, 8] int64: order, count, steps, max_parallel, origin, block length, most steps of editing
    alone, whether ends come last (decoding/reveal.py, not the kernel, looks at it)."""
    limits: torch.Tensor
    """[L, 6] float64: threshold, low_threshold, factor, entropy_bound, edit_threshold (infinite:
    none), alg_temp."""
    progress: torch.Tensor
    """[L, 3] int64: decisions taken, the start of the block that they were taken in, and how many
    of them found no mask."""
    adapted: torch.Tensor
    """[L] float64: the adaptive rule's threshold, which starts anew with every block: +0.05 after a
    step that took more than 0.7 of the masks, -0.05 after one that took less than 0.3, in [0.1,
    0.9]."""


class RowTokens(NamedTuple):
    """Of sampling/tables.py; `tokens` and `fixed` change."""

    tokens: torch.Tensor
    """[L, T] int64."""
    fixed: torch.Tensor
    """[L, T] bool."""
    prompt_lens: torch.Tensor
    """[L] int64."""
    seeds: torch.Tensor
    """[L] int64."""


class DecidedSpans(NamedTuple):
    """Whose positions they are (sampling/batch.DecideBatch), int64."""

    rows: torch.Tensor
    """[N]."""
    positions: torch.Tensor
    """[N]."""
    span_rows: torch.Tensor
    """[R]."""
    cu_decide: torch.Tensor
    """[R + 1]."""


class Choice(NamedTuple):
    """Of every decided position [N]; float32 but for the tokens."""

    token_ids: torch.Tensor
    probs: torch.Tensor
    margin: torch.Tensor
    entropy: torch.Tensor


class Block(NamedTuple):
    """On the device: where a span's decided positions are, and how far its block is."""

    line: tl.tensor
    first: tl.tensor
    count: tl.tensor
    start: tl.tensor
    taken: tl.tensor


class Held(NamedTuple):
    """On the device: a span's decided positions, [B] each."""

    inside: tl.tensor
    """Whether there is such a position."""
    at: tl.tensor
    """Its place among all that are decided."""
    own: tl.tensor
    """Its place in the tables."""
    position: tl.tensor
    current: tl.tensor
    """The token that it holds."""
    is_open: tl.tensor
    token: tl.tensor
    """The token chosen, and how sure that is."""
    probs: tl.tensor
    margin: tl.tensor
    entropy: tl.tensor


@jit
def find_block(spans: DecidedSpans, states: RowStates, num_positions: tl.tensor) -> Block:
    """A new block counts its decisions from 0. Spans of padding may be empty, also at the end."""
    span = tl.program_id(0)
    line = tl.load(spans.span_rows + span)
    first = tl.load(spans.cu_decide + span)
    count = tl.load(spans.cu_decide + span + 1) - first
    position = tl.load(spans.positions + tl.minimum(first, num_positions - 1))
    origin = tl.load(states.rules + line * 8 + 4)
    start = position - (position - origin) % tl.load(states.rules + line * 8 + 5)
    is_same = tl.load(states.progress + line * 3 + 1) == start
    taken = tl.where(is_same, tl.load(states.progress + line * 3), 0)
    return Block(line, first, count, start, taken)


@jit
def hold(
    block: Block,
    spans: DecidedSpans,
    rows: RowTokens,
    choice: Choice,
    table_width: tl.tensor,
    B: tl.constexpr,
) -> Held:
    """What the block's positions hold, and what was chosen for them."""
    place = tl.arange(0, B)
    inside, at = place < block.count, block.first + place
    position = tl.load(spans.positions + at, mask=inside, other=0)
    own = tl.load(spans.rows + at, mask=inside, other=0) * table_width + position
    return Held(
        inside,
        at,
        own,
        position,
        tl.load(rows.tokens + own, mask=inside, other=0),
        inside & (tl.load(rows.fixed + own, mask=inside, other=1) == 0),
        tl.load(choice.token_ids + at, mask=inside, other=0),
        tl.load(choice.probs + at, mask=inside, other=0.0),
        tl.load(choice.margin + at, mask=inside, other=0.0),
        tl.load(choice.entropy + at, mask=inside, other=0.0),
    )

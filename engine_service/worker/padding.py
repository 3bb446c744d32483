"""How a step is padded to the size of a captured one.

Host half, like layout.py. It does not know graphs or the device, nor which sizes there are.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from engine_service.core.step import FULL, Span
from engine_service.core.strategy import KeyChoice
from engine_service.worker.aside import pad_aside, padded
from engine_service.worker.buckets import Bucket
from engine_service.worker.layout import StepLayout, lay_out
from engine_service.worker.page_table import LatePages
from engine_service.worker.tables import RowTables
from engine_service.worker.wanted import DecideLayout


def pad(layout: StepLayout, bucket: Bucket, tables: RowTables) -> StepLayout:
    """The same step with the bucket's sizes; `layout` fits it and has at most one decided part.

    Tokens behind the real ones belong to the trash row and store into the trash page. Where every
    span has one query the padding spans have one too; elsewhere they have none, and the tokens
    left over belong to no span: what attention leaves there is read by nobody.
    """
    trash = tables.trash_row
    num_spans, num_tokens = len(layout.rows), len(layout.places)
    more_spans = bucket.rows - num_spans
    ends = np.full(more_spans, num_tokens, dtype=np.int32)
    if bucket.longest == 1:
        ends += np.arange(1, more_spans + 1, dtype=np.int32)
    own_slots = None
    if bucket.canvas:
        own = layout.positions if layout.slot_positions is None else layout.slot_positions
        own_slots = padded(own, bucket.tokens, 0)
    return replace(
        layout,
        columns=None,
        slot_positions=own_slots,
        places=padded(layout.places, bucket.tokens, trash * tables.width),
        positions=padded(layout.positions, bucket.tokens, 0),
        slots=padded(layout.slots, bucket.tokens, tables.trash_slot),
        rows=padded(layout.rows, bucket.rows, trash),
        cu_seqlens=np.concatenate((layout.cu_seqlens, ends)),
        kv_lens=padded(layout.kv_lens, bucket.rows, 1),
        mask_block=padded(layout.mask_block, bucket.rows, 1),
        late=layout.late and LatePages(*(padded(one, bucket.rows, -1) for one in layout.late)),
        max_query_len=bucket.longest,
        max_kv_len=tables.width,
        uniform_query_len=1 if bucket.longest == 1 else None,
        all_causal=bucket.longest == 1,
        decides=tuple(_pad_decided(part, bucket, trash) for part in layout.decides),
    )


def pad_forward(layout: StepLayout, bucket: Bucket, tables: RowTables) -> StepLayout:
    """The forward of the same step with the bucket's sizes: nothing is decided or scored."""
    layout = replace(layout, decides=(), scores=None, pools=None)
    if layout.aside is None:
        return pad(layout, bucket, tables)
    aside = pad_aside(
        layout.aside,
        tables,
        num_spans=bucket.rows,
        num_tokens=bucket.tokens,
        longest=bucket.longest,
    )
    places = padded(layout.places, bucket.tokens, tables.trash_row * tables.width)
    return replace(
        layout, places=places, positions=padded(layout.positions, bucket.tokens, 0), aside=aside
    )


def padding_forward(bucket: Bucket, tables: RowTables) -> StepLayout:
    """A step of padding alone, for what decides nothing."""
    aside, block = int(bucket.aside), FULL if bucket.canvas else 1
    span = Span(tables.trash_row, 0, 1, 1 - aside, block, 0, 0, aside=aside)
    nothing = KeyChoice(0, 0, by_head=False, pool=1)
    layout = lay_out([span], tables, logits_shift=0, logit_chunk=1, choice_of=lambda _: nothing)
    return pad_forward(layout, bucket, tables)


def _pad_decided(part: DecideLayout, bucket: Bucket, trash: int) -> DecideLayout:
    """One span more than the bucket has rows owns all positions behind the real ones.

    They read a token that nobody else reads, if there is one: the last layer computes what is read,
    and of what it computes twice either may be written last.
    """
    size, spans = bucket.decided, bucket.rows + 1
    cu_decide = padded(part.cu_decide, spans + 1, part.cu_decide[-1])
    cu_decide[-1] = size
    is_read = np.zeros(bucket.tokens, dtype=np.bool_)
    is_read[part.queries] = True
    return replace(
        part,
        queries=padded(part.queries, size, int(is_read.argmin())),
        rows=padded(part.rows, size, trash),
        positions=padded(part.positions, size, 0),
        span_rows=padded(part.span_rows, spans, trash),
        cu_decide=cu_decide,
    )

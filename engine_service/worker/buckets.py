"""The sizes of captured steps, and which of them has room for a step.

Host half, like layout.py. It does not know graphs or the device, nor what fills a size up.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from engine_service.core.step import FULL
from engine_service.core.strategy import DecodeStrategy
from engine_service.launching import LAUNCH_BOUND, launch_bound
from engine_service.models.base import ModelTraits
from engine_service.resolve import CANVAS_BLOCK, ResolvedConfig
from engine_service.sampling.batch import Wants
from engine_service.worker.layout import StepLayout

MAX_TOKENS = 512
"""Largest captured step of ragged spans that decides, too. Of a longer one the decision is launched
while the device computes."""

_SIZES = (
    *range(64, 512, 64),
    *range(512, 1024, 128),
    *range(1024, 2048, 256),
    *range(2048, 4097, 512),
)
"""Tokens of captured steps of spans that are of any length."""
_MOST_CANVAS_TOKENS = 3072
_SHORT_CANVAS, _MOST_CANVASES = 32, 32
"""Steps of shorter canvases, on average, or of more of them, are launched: a graph has a place for
every canvas, and one that is empty takes its time too."""

PLAIN = Wants(
    sampling=True, filters=False, penalties=False, bias=False, suppress=False, max_logprobs=None
)
"""What a whole graph decides for (`Wants.is_plain`)."""
FILTERED = replace(PLAIN, filters=True)
"""What another one does: top-k, top-p and min-p of some rows, whichever those are. One graph for
all rows would cost plain steps a launch that changes nothing and, where a piece of their logits is
enough, the others. Whatever else rows want is decided behind a graph (`Wants.only_draws`)."""


class Bucket(NamedTuple):
    """Sizes that a captured step has room for; a step is padded to the next bucket."""

    rows: int
    tokens: int
    longest: int
    """Most query tokens of one span."""
    decided: int
    """Rows of logits; 0: what is captured ends at the hidden states of all tokens."""
    canvas: bool = False
    """Spans are of canvases, whose tokens may stand in other slots than their positions."""
    aside: bool = False
    """They are canvases aside of the pages, all of them."""


def captured_choices(
    bucket: Bucket, *, logit_chunk: int, has_whole_head: bool
) -> tuple[Wants, ...]:
    """What the bucket has a whole graph for, one each; nothing where it decides nothing.

    Filters look at all logits of a position: at most `logit_chunk` of them exist at once, and where
    ranks share the head they would be gathered.
    """
    if not bucket.decided:
        return ()
    filters = has_whole_head and bucket.decided <= logit_chunk
    return (PLAIN, FILTERED) if filters else (PLAIN,)


def captured_choice(wants: Wants, choices: Collection[Wants]) -> Wants | None:
    """The one of `choices` that decides all that the rows of a step want; None: they are decided
    behind a graph."""
    if not wants.only_draws:
        return None
    own = FILTERED if wants.filters else PLAIN
    return own if own in choices else None


def row_sizes(max_rows: int) -> list[int]:
    """Padded numbers of rows: dense where a step is short, at most a sixth too many above."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, max_rows, 32)]
    return sorted({size for size in sizes if size < max_rows} | {max_rows})


def buckets_of(
    traits: ModelTraits,
    resolved: ResolvedConfig,
    strategies: Iterable[DecodeStrategy],
    in_pieces: bool,
    num_stages: int = 1,
) -> list[Bucket]:
    """All buckets of an engine, smallest first. `in_pieces` as in RowTables: where all logits of a
    step never exist at once, their number bounds nothing. None of an encoder: it decides nothing.
    Of several stages none decides: all of them replay the same sizes, and the last one launches
    its decision behind.
    """
    if not traits.methods:
        return []
    if num_stages > 1:
        whole = buckets_of(traits, resolved, strategies, in_pieces)
        forwards = {bucket._replace(decided=0) for bucket in whole}
        return sorted(forwards, key=lambda one: (one.tokens, one.rows, one.longest))
    logit_limit = resolved.logit_budget if in_pieces else resolved.logit_chunk
    if traits.mask_block >= FULL:
        blocks = list_canvas_buckets(
            max_rows=resolved.max_rows,
            hole=CANVAS_BLOCK + traits.logits_shift,
            max_decide=CANVAS_BLOCK,
            token_budget=resolved.token_budget,
            logit_limit=logit_limit,
        )
        whole = list_whole_canvases(
            max_rows=resolved.max_rows,
            longest=resolved.table_width,
            token_budget=resolved.token_budget,
        )
        return sorted(blocks + whole, key=lambda one: one.tokens)
    decoding = list_buckets(
        max_rows=resolved.max_rows,
        block=traits.mask_block,
        max_decide=max(strategy.max_decide for strategy in strategies),
        token_budget=resolved.token_budget,
        logit_limit=logit_limit,
    )
    prompts = list_prompts(
        max_rows=resolved.max_rows,
        most_tokens=min(resolved.token_budget, launch_bound(traits.hidden_size)),
    )
    return sorted(decoding + prompts, key=lambda one: one.tokens)


def list_canvas_buckets(
    *, max_rows: int, hole: int, max_decide: int, token_budget: int, logit_limit: int
) -> list[Bucket]:
    """Those of a model that sees everything: every row a block of `hole` positions over what is
    kept of its canvas."""
    limit = min(token_budget // hole, logit_limit // max_decide)
    return [
        Bucket(rows, rows * hole, hole, rows * max_decide, canvas=True)
        for rows in row_sizes(max_rows)
        if rows <= limit
    ]


def list_whole_canvases(*, max_rows: int, longest: int, token_budget: int) -> list[Bucket]:
    """Those of canvases of at most `longest` positions that are computed whole: aside of the pages,
    and, fewer sizes, over them, where blocks may stand among them.

    A graph ends at the hidden states, because launching a decision takes less time than the device
    needs for a canvas: so one graph serves blocks of any length, guidance, filters and whatever
    else decisions differ in.
    """
    made = []
    for tokens in _SIZES:
        if tokens > min(token_budget, _MOST_CANVAS_TOKENS):
            break
        most, spans = min(tokens, longest), min(max(2, tokens // _SHORT_CANVAS), _MOST_CANVASES)
        made.append(Bucket(min(2 * max_rows, spans), tokens, most, 0, canvas=True, aside=True))
        if tokens % 128 == 0 and tokens <= LAUNCH_BOUND:
            made.append(Bucket(min(max_rows, spans), tokens, most, 0, canvas=True))
    return made


def list_prompts(*, max_rows: int, most_tokens: int) -> list[Bucket]:
    """Those of a causal or block model with prompts, beside other rows or not: as with canvases
    that are computed whole, whatever is decided, scored or pooled is launched behind."""
    return [
        Bucket(min(tokens, max_rows), tokens, tokens, 0)
        for tokens in _SIZES
        if tokens <= most_tokens
    ]


def list_buckets(
    *, max_rows: int, block: int, max_decide: int, token_budget: int, logit_limit: int
) -> list[Bucket]:
    """All buckets of a causal or block model, smallest first; a step decides at most `logit_limit`
    positions.

    Causal models: every row one token, and ragged steps of short prompts beside decoding rows.
    Block models: rows of one block, or two where a finished block is stored with the next.
    """
    buckets = []
    for rows in row_sizes(max_rows):
        decided = rows * max_decide
        if decided > logit_limit:
            break
        if block == 1:
            buckets.append(Bucket(rows, rows, 1, decided))
            continue
        for blocks in (1, 2):
            buckets.append(Bucket(rows, rows * blocks * block, 2 * block, decided))
    if block == 1:
        for tokens in (size for size in _SIZES if size <= MAX_TOKENS):
            rows = min(tokens, max_rows, logit_limit)
            buckets.append(Bucket(rows, tokens, tokens, rows))
    limit = max(token_budget, max_rows)
    return sorted(
        (one for one in buckets if one.tokens <= limit), key=lambda one: (one.tokens, one.rows)
    )


def find_bucket(layout: StepLayout, buckets: Sequence[Bucket]) -> Bucket | None:
    """The first bucket with room for the step; None where it must be launched."""
    is_special = layout.scores or layout.pools or layout.aside
    if is_special is not None or len(layout.decides) != 1:
        return None
    rows, tokens = len(layout.rows), len(layout.places)
    longest, decided = layout.max_query_len, len(layout.decides[0].positions)
    return next(
        (
            bucket
            for bucket in buckets
            if bucket.decided
            and bucket.tokens >= tokens
            and bucket.rows >= rows
            and bucket.longest >= longest
            and bucket.decided >= decided
            and (bucket.longest > 1 or tokens == rows)
        ),
        None,
    )


def find_forward_bucket(
    layout: StepLayout, buckets: Sequence[Bucket], most_launched: int
) -> Bucket | None:
    """The first of those that decide nothing with room for the step; None where it must be
    launched, as where some canvases stand aside and others do not.

    Steps of more than `most_launched` tokens (`launch_bound` of the model) are replayed where an
    eighth is padded at most: padding costs more than launches there.
    """
    aside = layout.aside
    if aside is not None and len(layout.rows):
        return None
    num_spans = len(layout.rows) if aside is None else len(aside.lengths)
    longest = layout.max_query_len if aside is None else aside.longest
    num_tokens = len(layout.places)
    most = max(most_launched, num_tokens + num_tokens // 8)
    return next(
        (
            bucket
            for bucket in buckets
            if not bucket.decided
            and bucket.aside == (aside is not None)
            and num_tokens <= bucket.tokens <= most
            and bucket.rows >= num_spans
            and bucket.longest >= longest
            and (bucket.longest > 1 or num_tokens == num_spans)
        ),
        None,
    )

"""Runs steps of the kinds that requests make before there are any, so that no request waits for a
compiler, or for a library that makes its kernels when they are asked for.

A kernel is compiled once for every way in which a step launches it: by the length of its longest
query, by whether keys are split, by what its rows want to be chosen by. It does not know those
ways; it tries sizes by powers of two. Everything is read from and written to the trash row. (The
one request that `core/warm_up.py` sends through a whole engine meets few of them.)

A kernel that cannot be built here fails here, and not in a request.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain

import torch

from engine_service.core.step import Span, granularity
from engine_service.kernels.jit import runs_triton
from engine_service.models.base import ModelTraits
from engine_service.resolve import ResolvedConfig
from engine_service.sampling.batch import Wants
from engine_service.staging import stage as put
from engine_service.worker.batch import bind_batch, columns_of
from engine_service.worker.buckets import FILTERED, PLAIN
from engine_service.worker.layout import lay_out
from engine_service.worker.program import StepProgram
from engine_service.worker.tables import RowTables

_MOST_TOKENS = 2048
"""Of a step here. Longer ones run the same kernels, and one has been run to see what memory it
takes."""
_MOST_QUERIES = 64
"""Of spans of which there are several; from a few more on a span is a prompt to all kernels."""
_PROMPT = 256
"""Tokens of one that has shorter spans beside it."""
_ROWS = (1, 2, 24)
"""That choose in all ways."""
_FEW_TOP_K = 20


def build_kernels(program: StepProgram, resolved: ResolvedConfig) -> None:
    """Waits for the device. Nothing to do where no kernels are compiled."""
    if not runs_triton(program.tables.sampling.temperature):
        return
    own = replace(program, stage=program.stage.unlinked)
    traits, row = program.model.traits, program.tables.trash_row
    for spans in typical_steps(resolved, traits, row):
        _run(own, spans, resolved, [PLAIN])
    if traits.methods:
        most = max(1, resolved.logit_chunk // granularity(traits.mask_block))
        for count in sorted({min(count, most, resolved.max_rows) for count in _ROWS}):
            _run(own, [_span(1, 0, traits, row)] * count, resolved, list(kinds_of_choice()))
    if program.tables.device.type == "cuda":
        torch.cuda.synchronize(program.tables.device)


def typical_steps(resolved: ResolvedConfig, traits: ModelTraits, row: int) -> Iterator[list[Span]]:
    """Spans of one length behind nothing and behind as much as a row has room for, one and many of
    them; and the shortest ones beside a prompt. The row's last position is never decided: there
    stands the mask token that other rows read (`RowTables.mask_place`)."""
    block = granularity(traits.mask_block)
    longest = (resolved.table_width - 1 - traits.logits_shift) // block
    most = min(resolved.token_budget, _MOST_TOKENS) // block
    for behind in (0, longest * block):
        for blocks in _powers(min(most, longest)):
            several = resolved.max_rows if blocks * block <= _MOST_QUERIES else 2
            for count in _powers(min(most // blocks, several, resolved.max_rows)):
                yield [_span(blocks, behind, traits, row)] * count
        prompt = _span(max(1, min(_PROMPT // block, longest, most // 2)), 0, traits, row)
        for count in _powers(min(most - prompt.num_tokens // block, resolved.max_rows - 1)):
            yield [prompt, *[_span(1, behind, traits, row)] * count]


def kinds_of_choice() -> Iterator[Wants]:
    """What rows want, each by itself, and everything at once."""
    yield PLAIN
    yield FILTERED
    yield replace(FILTERED, max_top_k=_FEW_TOP_K)
    yield replace(PLAIN, penalties=True)
    yield replace(PLAIN, bias=True)
    yield replace(PLAIN, suppress=True)
    yield replace(PLAIN, mask=True)
    yield replace(PLAIN, max_logprobs=0)
    everything = replace(FILTERED, penalties=True, bias=True, suppress=True)
    yield replace(everything, max_logprobs=1)


def _powers(most: int) -> Iterator[int]:
    """1, 2, 4 ... and the most."""
    powers = chain((1 << shift for shift in range(max(most, 0).bit_length())), (most,))
    return iter(sorted({power for power in powers if 0 < power <= most}))


def _span(blocks: int, behind: int, traits: ModelTraits, row: int) -> Span:
    """So many blocks, the last of which is decided (of causal models the token behind it), at the
    start of a row or before its position `behind`."""
    block = granularity(traits.mask_block)
    stop = max(blocks * block, behind)
    decided = (stop, stop + 1) if traits.logits_shift else (stop - block, stop)
    return Span(row, stop - blocks * block, stop, stop, block, *decided)


@contextmanager
def _masks_of(tables: RowTables, vocab_size: int | None) -> Iterator[None]:
    """Rows have masks, with all bits, as if somebody had brought the first; None: as they are."""
    before = tables.sampling
    if vocab_size is not None:
        size = (len(before.tokens), -(-vocab_size // 32))
        masks = torch.full(size, -1, dtype=torch.int32, device=tables.device)
        tables.sampling = replace(before, masks=masks)
    try:
        yield
    finally:
        tables.sampling = before


@torch.inference_mode()
def _run(
    program: StepProgram, spans: Sequence[Span], resolved: ResolvedConfig, kinds: Sequence[Wants]
) -> None:
    """Of all methods in turn, and of every kind of choice."""
    tables, traits = program.tables, program.model.traits
    layout = lay_out(
        spans,
        tables,
        logits_shift=traits.logits_shift,
        logit_chunk=resolved.logit_chunk,
        longest_first=True,
    )
    batch = bind_batch(layout, put(columns_of(layout), tables.device), tables)
    if not program.stage.is_last:
        program.forward(batch)
        return
    states = program.states(batch)
    for part in batch.decides:
        for method in range(len(program.strategies)):
            for wants in kinds:
                own = replace(part, layout=replace(part.layout, method=method, wants=wants))
                with _masks_of(tables, traits.vocab_size if wants.mask else None):
                    program.decide(own, program.logits(own, states))

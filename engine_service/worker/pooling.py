"""What is pooled of a step's hidden states: which queries, into which rows, and what comes out.

A prompt may be computed in several steps: each adds up its share in the row's float32 sum, the
first one anew. It does not know models: hidden states in, vectors out.
Shape legend: P spans that are pooled, N queries that count, C chunks of them, F spans that end a
prompt, E hidden size, L labels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from engine_service.core.step import Decision
from engine_service.worker.pool_rows import PoolKind, PoolRows
from engine_service.worker.wanted import Queries, ranges, running_sum

_LEAST_NORM = 1e-12
"""Of a vector that is divided by its norm: zero stays zero (torch's normalize)."""

Head = Callable[[torch.Tensor], torch.Tensor]
"""[N, E] to [N, L] probabilities of labels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLayout:
    """Host half: numpy columns, int64 unless said otherwise."""

    queries: np.ndarray
    """[N] queries that count, span after span."""
    lengths: np.ndarray
    """[C, P] how many of a chunk's queries are of every span."""
    rows: np.ndarray
    """[P]"""
    is_first: np.ndarray
    """[P] bool: nothing has been summed yet."""
    ending: np.ndarray
    """[F] which of the P spans end a prompt; those for the head last."""
    shares: np.ndarray
    """[F] float32: what the sum is multiplied by."""
    dimensions: np.ndarray
    """[F] leading features to keep."""
    normalize: np.ndarray
    """[F] bool."""
    spans: np.ndarray
    """[F] indices into the plan's spans."""
    chunk: int
    num_embedded: int
    """The first of the F; the others go through the head."""

    @property
    def columns(self) -> list[np.ndarray]:
        """What the device reads, in the order of PoolPart."""
        return [
            self.queries,
            self.lengths,
            self.rows,
            self.is_first,
            self.ending,
            self.shares,
            self.dimensions,
            self.normalize,
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPart:
    """The device columns of a PoolLayout."""

    layout: PoolLayout
    queries: torch.Tensor
    lengths: torch.Tensor
    rows: torch.Tensor
    is_first: torch.Tensor
    ending: torch.Tensor
    shares: torch.Tensor
    dimensions: torch.Tensor
    normalize: torch.Tensor


class Pooled(NamedTuple):
    """[F', E] float32 embeddings, and [F - F', L] labels; None where there is nobody to tell."""

    embeddings: torch.Tensor | None
    labels: torch.Tensor | None


def take_pooled(
    queries: Queries, rows: PoolRows | None, chunk: int
) -> tuple[PoolLayout | None, Queries]:
    """What is pooled, and the same spans, of which those that are pooled decide nothing."""
    layout = _lay_out(queries, rows, chunk)
    if layout is None:
        return None, queries
    columns = queries.columns
    is_pooled = np.isin(columns.row, layout.rows)
    stop = np.where(is_pooled, columns.decide_start, columns.decide_stop)
    return layout, queries._replace(columns=columns._replace(decide_stop=stop))


def _lay_out(queries: Queries, rows: PoolRows | None, chunk: int) -> PoolLayout | None:
    """The queries of rows that are pooled, `chunk` at a time; None where there are none."""
    columns = queries.columns
    spans = np.empty(0) if rows is None else rows.kind[columns.row].nonzero()[0]
    if rows is None or spans.size == 0:
        return None
    row, start, stop = columns.row[spans], columns.start[spans], columns.stop[spans]
    kind, ends = rows.kind[row], columns.decide_stop[spans] > columns.decide_start[spans]
    # mean takes all, cls the prompt's first, last its last query.
    first = np.where(kind == PoolKind.LAST, np.where(ends, stop - 1, stop), start)
    behind = np.where(kind == PoolKind.CLS, np.where(start == 0, 1, start), stop)
    counts = behind - first
    offsets = queries.cu_seqlens[spans] - start
    ending = ends.nonzero()[0]
    ending = ending[np.argsort(rows.classifies[row[ending]], kind="stable")]
    last_rows = row[ending]
    is_mean = rows.kind[last_rows] == PoolKind.MEAN
    return PoolLayout(
        queries=ranges(first, counts) + offsets.repeat(counts),
        lengths=_chunk_lengths(counts, chunk),
        rows=row,
        is_first=(start == 0) | (kind == PoolKind.LAST),
        ending=ending,
        shares=np.where(is_mean, 1 / rows.length[last_rows], 1).astype(np.float32),
        dimensions=rows.dimensions[last_rows],
        normalize=rows.normalize[last_rows],
        spans=queries.order[spans[ending]],
        chunk=chunk,
        num_embedded=int(np.count_nonzero(~rows.classifies[last_rows])),
    )


def pool(
    part: PoolPart, hidden: torch.Tensor, sums: torch.Tensor, features: Head, head: Head | None
) -> Pooled:
    """Adds the step's share to `sums` and takes what is complete. `features` are the [N, E] last
    hidden states of some of a forward's [T, E]. Nothing waits for the device."""
    layout = part.layout
    total = sums.index_select(0, part.rows).masked_fill(part.is_first[:, None], 0)
    # Not index_add: its sums depend on the order in which a device gets to them.
    chunks = part.queries.split(layout.chunk) if len(part.lengths) else ()
    for queries, lengths in zip(chunks, part.lengths, strict=True):
        states = features(hidden.index_select(0, queries)).float()
        total = total + torch.segment_reduce(states, "sum", lengths=lengths, unsafe=True)
    sums.index_copy_(0, part.rows, total)
    ended = total.index_select(0, part.ending) * part.shares[:, None]
    count = layout.num_embedded
    embeddings, labels = None, None
    if count:
        embeddings = _embed(ended[:count], part.dimensions[:count], part.normalize[:count])
    if count < len(ended):
        assert head is not None, "a row for a head that the model lacks"
        labels = head(ended[count:].to(hidden.dtype)).float()
    return Pooled(embeddings, labels)


def split_pooled(layout: PoolLayout, pooled: Pooled, decisions: list[Decision | None]) -> None:
    """Gives every prompt that has ended its vector."""
    vectors: list[np.ndarray] = []
    if pooled.embeddings is not None:
        vectors += [
            vector[:size]
            for vector, size in zip(
                pooled.embeddings.numpy(), layout.dimensions.tolist(), strict=False
            )
        ]
    if pooled.labels is not None:
        vectors += list(pooled.labels.numpy())
    for span, vector in zip(layout.spans.tolist(), vectors, strict=True):
        decisions[span] = Decision([], [], vector=vector.astype("<f4").tobytes())


def _embed(
    vectors: torch.Tensor, dimensions: torch.Tensor, normalize: torch.Tensor
) -> torch.Tensor:
    """Cut first, normalised then: a shorter Matryoshka embedding has length 1 as well."""
    is_kept = torch.arange(vectors.shape[1], device=vectors.device) < dimensions[:, None]
    kept = vectors.masked_fill(~is_kept, 0)
    norms = kept.norm(dim=1, keepdim=True).clamp_min(_LEAST_NORM)
    return torch.where(normalize[:, None], kept / norms, kept)


def _chunk_lengths(counts: np.ndarray, chunk: int) -> np.ndarray:
    """[C, P] of spans with `counts` queries, `chunk` queries at a time."""
    ends = running_sum(counts)
    borders = np.arange(0, ends[-1], chunk)[:, None]
    inside = np.clip(ends, borders, borders + chunk)
    return np.ascontiguousarray(np.diff(inside, axis=1))

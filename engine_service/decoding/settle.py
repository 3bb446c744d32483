"""What a step does behind its choice of tokens: it reveals what each row's rule says, edits, and
writes tokens, fixed bits and the rows' progress; in plain torch, or by the kernel that computes the
same. It does not know how tokens are chosen.
Shape legend: N decided positions, R spans, B positions of a block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from engine_service.decoding.editing import Edit, edit
from engine_service.decoding.reveal_knobs import LEAST_START, MOST_START
from engine_service.decoding.rules import Count, Evidence, Order, Terms, present, reveal
from engine_service.kernels.confidence import Confidence
from engine_service.kernels.jit import runs_triton
from engine_service.kernels.reveal import MAX_BLOCK, count_draws_triton, reveal_triton
from engine_service.kernels.reveal_rows import Choice, DecidedSpans, RowStates, RowTokens
from engine_service.kernels.reveal_rules import Codes
from engine_service.sampling.batch import DecideBatch
from engine_service.sampling.rng import Purpose, draw_keys, uniform

_ADAPTIVE_STEP = 0.05
_LAST = -1e9
"""Below all measures of how sure a choice is."""
_MANY, _FEW = 0.7, 0.3
"""Shares of the masks that the adaptive rule took, beyond which its threshold moves."""
_CODES = Codes(
    margin=int(Order.MARGIN),
    negative_entropy=int(Order.NEGATIVE_ENTROPY),
    uniform=int(Order.UNIFORM),
    from_the_left=int(Order.FROM_THE_LEFT),
    order_splitting=int(Order.SPLITTING),
    dynamic=int(Count.DYNAMIC),
    dream_schedule=int(Count.DREAM_SCHEDULE),
    coins=int(Count.COINS),
    threshold=int(Count.THRESHOLD),
    at_most=int(Count.AT_MOST),
    factor=int(Count.FACTOR),
    entropy_bound=int(Count.ENTROPY_BOUND),
    prefix=int(Count.PREFIX),
    count_splitting=int(Count.SPLITTING),
    remask=int(Purpose.REMASK),
)
"""For the kernel. Confidence and schedules are what it takes for all others."""


@dataclass(frozen=True, slots=True, eq=False)
class RevealState:
    """What is kept of every row, and the model's mask token."""

    rows: RowStates
    mask_token_id: int


class Settled(NamedTuple):
    """Behind a step."""

    token_ids: torch.Tensor
    """[N] int64."""
    final: torch.Tensor
    """[N] bool."""


class Settling(Protocol):
    """One step's; made before tokens are chosen."""

    @property
    def draws(self) -> torch.Tensor:
        """[N] int64: decisions taken in the position's block so far."""

    def settle(self, choice: Confidence) -> Settled:
        """Writes what the step makes of the tokens chosen."""


def open_settling(batch: DecideBatch, state: RevealState, *, width: int) -> Settling:
    """By the kernel where kernels run, and for blocks that fit it."""
    if width <= MAX_BLOCK and runs_triton(batch.tables.temperature):
        return OnDevice(batch, state, width)
    return InTorch(batch, state, width)


class OnDevice:
    """Two launches."""

    def __init__(self, batch: DecideBatch, state: RevealState, width: int) -> None:
        self._batch, self._state, self._width = batch, state, width
        self._spans = DecidedSpans(
            batch.rows, batch.positions, batch.span_rows, batch.cu_decide.contiguous()
        )
        self.draws = count_draws_triton(self._spans, state.rows)

    def settle(self, choice: Confidence) -> Settled:
        tables = self._batch.tables
        found = (choice.token_ids, choice.probs, choice.margin, choice.entropy)
        made = reveal_triton(
            self._spans,
            self._state.rows,
            RowTokens(tables.tokens, tables.fixed, tables.prompt_lens, tables.seeds),
            Choice(*(one.contiguous() for one in found)),
            width=self._width,
            mask_token_id=self._state.mask_token_id,
            codes=_CODES,
        )
        return Settled(*made)


class _Blocks(NamedTuple):
    """The span of every position [N]; decisions taken in the span's block and its start [R]."""

    span_of: torch.Tensor
    taken_R: torch.Tensor
    start_R: torch.Tensor


class InTorch:
    """The same for blocks of any length; it says what the kernel computes."""

    def __init__(self, batch: DecideBatch, state: RevealState, width: int) -> None:
        self._batch, self._state, self._width = batch, state, width
        self._at = self._find_blocks()
        self.draws = self._at.taken_R[self._at.span_of]

    def settle(self, choice: Confidence) -> Settled:
        batch, (span_of, taken, block_start) = self._batch, self._at
        rows, positions, tables = batch.rows, batch.positions, batch.tables
        states = self._state.rows
        is_open = ~tables.fixed[rows, positions]
        current = tables.tokens[rows, positions]
        least = states.limits[batch.span_rows, 4]
        # No choice is ever the mask token: an open position without it holds a tentative token.
        is_empty = current == self._state.mask_token_id
        is_masked = is_open & (is_empty | (least == torch.inf)[span_of])
        take = self._take(choice, is_masked)
        seen = Edit(
            span_of=span_of,
            is_open=is_open,
            is_masked=is_masked,
            take=take,
            differs=choice.token_ids != current,
            probs=choice.probs,
        )
        num_post = torch.where(taken == 0, 0, states.progress[batch.span_rows, 2])
        max_post = states.rules[batch.span_rows, 6]
        edited = edit(seen, least, num_post_R=num_post, max_post_R=max_post)
        token_ids = torch.where(edited.changed, choice.token_ids, current)
        final = ~is_open | edited.final
        progress = (taken + 1, block_start, edited.num_post_R)
        states.progress[batch.span_rows] = torch.stack(progress, dim=1)
        tables.tokens[rows, positions] = token_ids
        tables.fixed[rows, positions] = final
        return Settled(token_ids, final)

    def _find_blocks(self) -> _Blocks:
        """A new block counts its decisions from 0."""
        batch, states = self._batch, self._state.rows
        count = torch.arange(len(batch.rows), device=batch.rows.device)
        span_of = torch.searchsorted(batch.cu_decide[1:].contiguous(), count, right=True)
        # Spans of padding may be empty, also at the very end.
        last = len(batch.positions) - 1
        first = batch.positions[batch.cu_decide[:-1].clamp(max=last)]
        origin, block = states.rules[batch.span_rows, 4], states.rules[batch.span_rows, 5]
        start = first - (first - origin) % block
        progress = states.progress[batch.span_rows]
        return _Blocks(span_of, torch.where(progress[:, 1] == start, progress[:, 0], 0), start)

    def _take(self, choice: Confidence, is_masked: torch.Tensor) -> torch.Tensor:
        """[N] bool: masked positions that fall."""
        batch, states, (span_of, _, start) = self._batch, self._state.rows, self._at
        # Positions of padding lie anywhere.
        column = (batch.positions - start[span_of]).clamp(min=0, max=self._width - 1)
        terms = self._terms()
        measures = _measure(batch, choice, self.draws, terms)
        seen = _lay_out(measures, is_masked, (span_of, column), (len(start), self._width))
        take_RB = reveal(seen, terms)
        states.adapted[batch.span_rows] = adapt(terms.threshold_R, take_RB, seen.masked_RB)
        return take_RB[span_of, column] & is_masked

    def _terms(self) -> Terms:
        batch, states, (_, taken, start) = self._batch, self._state.rows, self._at
        order, count, steps, max_parallel, _, block, _, _ = states.rules[batch.span_rows].unbind(1)
        limits = states.limits[batch.span_rows].unbind(1)
        threshold, low_threshold, factor, bound, _, alg_temp = limits
        adapted = torch.where(taken == 0, threshold, states.adapted[batch.span_rows])
        prompt_lens = batch.tables.prompt_lens[batch.span_rows]
        return Terms(
            order_R=order,
            count_R=count,
            num_masks_R=torch.minimum(start + block - prompt_lens, block),
            steps_R=steps,
            step_R=taken,
            max_parallel_R=max_parallel,
            threshold_R=torch.where(count == Count.AT_MOST, adapted, threshold),
            low_threshold_R=low_threshold,
            factor_R=factor,
            entropy_bound_R=bound,
            alg_temp_R=alg_temp,
        )


def held_back(choice: Confidence, is_held: torch.Tensor) -> Confidence:
    """The choice in which positions `is_held` [N] are less sure than any other."""
    return choice._replace(
        probs=choice.probs.masked_fill(is_held, _LAST),
        margin=choice.margin.masked_fill(is_held, _LAST),
        entropy=choice.entropy.masked_fill(is_held, -_LAST),
    )


def adapt(
    threshold_R: torch.Tensor, take_RB: torch.Tensor, masked_RB: torch.Tensor
) -> torch.Tensor:
    """[R] float64: the adaptive rule's threshold in the next step."""
    share = take_RB.sum(dim=1) / masked_RB.sum(dim=1).clamp(min=1).double()
    move = _ADAPTIVE_STEP * ((share > _MANY).double() - (share < _FEW).double())
    return (threshold_R + move).clamp(LEAST_START, MOST_START)


def _measure(
    batch: DecideBatch, choice: Confidence, draws: torch.Tensor, terms: Terms
) -> torch.Tensor:
    """[4, N] confidence, margin, negative entropy and a random number of every position, which is
    anything where no row needs one."""
    probs = choice.probs
    random = torch.full_like(probs, 0.5)
    # On CUDA every order is found, and nothing is looked at.
    if Order.UNIFORM in present(terms.order_R, Order) or bool((terms.alg_temp_R > 0).any()):
        keys = draw_keys(batch.tables.seeds[batch.rows], Purpose.REMASK, batch.positions, draws)
        first = torch.zeros(1, dtype=torch.int64, device=keys.device)
        random = uniform(keys, first, probs.dtype)[:, 0]
    return torch.stack((probs, choice.margin, -choice.entropy, random))


def _lay_out(
    measures: torch.Tensor,
    is_open: torch.Tensor,
    place: tuple[torch.Tensor, torch.Tensor],
    shape: tuple[int, int],
) -> Evidence:
    """Measures [4, N] and open bits [N] as tables of `shape`; `place` are rows and columns [N]."""
    table = measures.new_zeros(len(measures), *shape)
    masked = is_open.new_zeros(shape)
    table[:, place[0], place[1]] = measures
    masked[place] = is_open
    return Evidence(
        masked_RB=masked,
        confidence_RB=table[0],
        margin_RB=table[1],
        negative_entropy_RB=table[2],
        uniform_RB=table[3],
    )

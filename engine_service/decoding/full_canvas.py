"""Full-canvas diffusion (LLaDA, Dream): prompt and answer are one canvas that every position sees.

Host half and device half of the method; it does not know requests, pages or models. The answer is
as long as `max_tokens` from the start and is revealed block by block. Keys and values change with
every token revealed, so they are never shared between requests.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch

from engine_service.core.step import FULL, Canvas, Decision, NewRow, Span, Update
from engine_service.core.strategy import Budget, DecodeStrategy, KeyChoice, Needs, View
from engine_service.decoding.canvas_cache import (
    CACHES,
    KNOBS,
    read_cache,
    without_other_caches,
)
from engine_service.decoding.canvas_params import DEFAULT_BLOCK, FullCanvasParams
from engine_service.decoding.knobs import read_number, read_whole, reject_unknown, wrong_knob
from engine_service.decoding.pace import left_open
from engine_service.decoding.reveal import RevealTables
from engine_service.decoding.reveal_knobs import (
    read_knobs,
    with_defaults,
)
from engine_service.decoding.tail import count_fixed, masks, merge
from engine_service.sampling.batch import DecideBatch, DecideResult
from engine_service.staging import stage
from tidemill.runtime.errors import Unsupported

_MOST = 1 << 20
"""Beyond every context; what really fits is said when the length is known."""
_MOST_SCALE = 1e6
"""Of guidance: times logits it stays in float32."""
_DEFAULT_ANSWER = 128
"""Positions of the answer of requests without max_tokens (LLaDA's)."""


class FullCanvas(DecodeStrategy):
    """Blocks are counted from the end of the prompt; the last one may be shorter."""

    name = "full_canvas"
    Params = FullCanvasParams
    supports = frozenset({"logprobs", "min_tokens", "logit_bias", "canvas", "pinned"})
    mask_block = FULL
    default_max_tokens = _DEFAULT_ANSWER
    approximate_caches = CACHES[1:]

    def __init__(
        self,
        *,
        mask_token_id: int,
        logits_shift: int,
        eos_token_ids: tuple[int, ...] = (),
        eot_token_ids: tuple[int, ...] = (),
    ) -> None:
        self.mask_token_id: int = mask_token_id
        self._shift = logits_shift
        self._ends = (eos_token_ids, eot_token_ids)

    @classmethod
    def for_model(
        cls,
        *,
        mask_block: int,
        mask_token_id: int | None,
        logits_shift: int,
        eos_token_ids: tuple[int, ...] = (),
        eot_token_ids: tuple[int, ...] = (),
    ) -> FullCanvas:
        """Raises Unsupported for a model without a mask token, or one that does not see all."""
        if mask_token_id is None or mask_block < FULL:
            raise Unsupported(
                f"{cls.name} needs a model with a mask token whose positions all see each other",
                param="method",
            )
        return cls(
            mask_token_id=mask_token_id,
            logits_shift=logits_shift,
            eos_token_ids=eos_token_ids,
            eot_token_ids=eot_token_ids,
        )

    def with_defaults(self, defaults: dict[str, Any], asked: dict[str, Any]) -> dict[str, Any]:
        """Leaves out defaults of other rules and caches."""
        return with_defaults(without_other_caches(defaults, asked), asked)

    def parse(self, knobs: dict[str, Any]) -> FullCanvasParams:
        """Checked knobs; what depends on the answer's length is checked by `needs`."""
        reject_unknown(knobs, FullCanvasParams, self.name, beside=KNOBS)
        steps, block = 0, knobs.get("block_length")
        if "steps" in knobs:
            steps = _read_length("steps", knobs["steps"])
        if block is not None:
            block = _read_length("block_length", block)
        rule = read_knobs(knobs, max_steps=_MOST)
        cache = read_cache(knobs)
        scale = read_number("cfg_scale", knobs.get("cfg_scale", 0), low=0, high=_MOST_SCALE)
        if scale and not cache.is_exact:
            raise wrong_knob("cfg_scale", scale, f"0 or left out with cache {cache.name}")
        return FullCanvasParams(
            **{**asdict(rule), "steps": steps},
            block_length=block,
            cache=cache,
            cfg_scale=scale,
        )

    def needs(self, prompt_len: int, max_len: int, params: Any) -> Needs:
        """A whole canvas in one step; raises InvalidRequest where steps or block_length do not go
        with the answer's length."""
        answer = max_len - prompt_len
        block, gap = params.block_of(answer), params.gap_of(answer)
        if block > answer:
            length = f"max_tokens {answer}" if gap == answer else f"{answer} with what is pinned"
            raise wrong_knob("block_length", block, f"at most the length of the answer, {length}")
        length = f"max_tokens {gap}" if gap == answer else f"a gap of {gap}"
        blocks = params.blocks_of(answer)
        if params.steps % blocks or params.steps > blocks * block:
            raise wrong_knob(
                "steps",
                params.steps,
                f"a multiple of the {blocks} blocks of {block} positions that {length} makes, from "
                f"{blocks} to {blocks * block}",
            )
        tokens = max_len * (2 if params.cfg_scale else 1)
        return Needs(tokens, block, params.cache.room(max_len, block + self._shift))

    def begin(self, committed_len: int, params: Any, max_len: int) -> Canvas:
        """Masks for the whole answer."""
        return masks(self.mask_token_id, max_len - committed_len)

    def max_cached(self, committed_len: int) -> int:
        """Nothing: what a position computes depends on the whole canvas."""
        return 0

    def plan(self, view: View, budget: Budget) -> Span | None:
        """Everything where keys and values are to be computed anew, else what the cache lacks."""
        canvas, params = view.canvas, view.params
        end = view.committed_len + len(canvas.token_ids)
        opened = view.committed_len + canvas.fixed.index(False)
        start, stop = _block_of(opened, view.prompt_len, end, params)
        last = stop - view.committed_len - 1
        while canvas.fixed[last]:
            last -= 1
        decided = (opened, view.committed_len + last + 1)
        hole = (start - self._shift, stop)
        is_stored = view.num_cached > 0
        start, stop, kv_len, kept, aside = params.cache.extent(
            hole, end, self.room(view), step=canvas.step, is_stored=is_stored
        )
        aside = 2 if params.cfg_scale else aside
        span = Span(view.row, start, stop, kv_len, FULL, *decided, kept=kept, aside=aside)
        span = count_fixed(span, view.committed_len, canvas)
        return span if budget.allows(span) else None

    def foresee(self, view: View, span: Span, *, may_err: bool) -> View | None:
        """What is open behind `span`, where the rule says how much: the same block, or the next
        one. Nothing is assumed: a whole canvas in vain would cost more than a step sat out. One is
        computed in vain behind an end that `span` turns out to decide."""
        canvas, params = view.canvas, view.params
        end = view.committed_len + len(canvas.token_ids)
        first = max(0, span.decide_start - view.committed_len)
        last = max(0, span.decide_stop - view.committed_len)
        num_open = canvas.fixed[first:last].count(False)
        steps = params.steps_of(end - view.prompt_len)
        left = left_open(params, num_open, step=canvas.step, steps=steps)
        if left is None or not num_open:
            return None
        if left:
            ahead = canvas._replace(step=canvas.step + 1)
            return view._replace(num_cached=span.kv_len, canvas=ahead)
        fixed = (*canvas.fixed[:first], *(True,) * (last - first), *canvas.fixed[last:])
        ahead = Canvas(canvas.token_ids, fixed)
        return view._replace(num_cached=span.kv_len, canvas=ahead) if False in fixed else None

    def room(self, view: View) -> int:
        """What the cache ever holds: nobody is preempted for the pages of a canvas."""
        end = view.committed_len + len(view.canvas.token_ids)
        block = view.params.block_of(end - view.prompt_len)
        return view.params.cache.room(end, block + self._shift)

    def restart(self, view: View) -> tuple[int, Canvas]:
        """With a cache a block begins anew: what is kept was computed while the block was masked,
        and so it is again. Without one nothing is given up, but to rules that remember."""
        canvas = view.canvas
        if view.params.resumes():
            return view.committed_len, canvas
        end = view.committed_len + len(canvas.token_ids)
        opened = view.committed_len + canvas.fixed.index(False)
        start, stop = _block_of(opened, view.prompt_len, end, view.params)
        behind = stop - view.committed_len
        masked = masks(self.mask_token_id, stop - start)
        return start, Canvas(
            masked.token_ids + canvas.token_ids[behind:], masked.fixed + canvas.fixed[behind:]
        )

    def settle(
        self, committed_len: int, canvas: Canvas, span: Span, decision: Decision | None
    ) -> Update:
        """Commits the leading final positions; `num_cached` says that something is stored."""
        assert decision is not None, f"a span of a full canvas always decides: {span}"
        tail = merge(committed_len, canvas, span, decision)
        step = 0 if all(decision.final) else canvas.step + 1
        return Update(tail.committed, tail.committed_logprobs, span.kv_len, tail.rest(step))

    def bind(self, max_rows: int, device: Any) -> None:
        """Tables of the rows' rules; the columns of a decision are as many as the longest block."""
        self._reveal = RevealTables(
            max_rows, device, mask_token_id=self.mask_token_id, ends=self._ends
        )
        self._blocks = [1] * (max_rows + 1)
        self._kept_by: dict[int, tuple[FullCanvasParams, int, int]] = {}
        self._scales = torch.zeros(max_rows + 1, dtype=torch.float32, device=device)

    def admit(self, rows: list[NewRow]) -> None:
        """Writes rules and counters, those of preempted requests included."""
        starts, blocks, knobs = [], [], []
        for new in rows:
            end = len(new.token_ids) + len(new.canvas.token_ids)
            opened = len(new.token_ids) + new.canvas.fixed.index(False)
            answer = end - new.prompt_len
            block = new.params.block_of(answer)
            starts.append(_block_of(opened, new.prompt_len, end, new.params)[0])
            blocks.append(block)
            knobs.append(replace(new.params, steps=new.params.steps_of(answer)))
            self._blocks[new.row] = block
            self._kept_by[new.row] = (new.params, new.prompt_len, end)
        self._write_scales(rows)
        self._reveal.admit(
            [new.row for new in rows],
            knobs,
            steps_taken=[new.canvas.step for new in rows],
            block_starts=starts,
            origins=[new.prompt_len for new in rows],
            blocks=blocks,
        )

    def choice_of(self, span: Span) -> KeyChoice:
        """What the span's own hole attends to, which takes in the query ahead of its block if the
        model's logits are shifted."""
        params, prompt_len, end = self._kept_by[span.row]
        start, stop = _block_of(span.decide_start, prompt_len, end, params)
        cache = params.cache
        return KeyChoice(start - self._shift, stop, cache.head_select, cache.pool_kernel)

    def guide(
        self, logits_NV: torch.Tensor, unguided_NV: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        """l_u + (s + 1) (l - l_u), in float32 (LLaDA's generate, after Nie et al. 2025)."""
        logits, unguided = logits_NV.float(), unguided_NV.float()
        scales = self._scales[rows, None]
        return (unguided + (scales + 1) * (logits - unguided)).to(logits_NV.dtype)

    def _write_scales(self, rows: list[NewRow]) -> None:
        at = np.array([new.row for new in rows], dtype=np.int64)
        scales = np.array([new.params.cfg_scale for new in rows], dtype=np.float32)
        where, values = stage([at, scales], self._scales.device)
        self._scales[where] = values

    def decide(self, batch: DecideBatch) -> DecideResult:
        """Chooses a token for every open position and reveals what each row's rule says.

        No narrower than DEFAULT_BLOCK: a captured step is, and serves rows that come later.
        """
        return self._reveal.decide(batch, width=max(DEFAULT_BLOCK, *self._blocks))


def _block_of(
    position: int, prompt_len: int, end: int, params: FullCanvasParams
) -> tuple[int, int]:
    """[start, stop) of the block that an answer's position lies in."""
    block = params.block_of(end - prompt_len)
    start = prompt_len + (position - prompt_len) // block * block
    return start, min(start + block, end)


def _read_length(name: str, value: Any) -> int:
    """At most the answer's, which `needs` checks."""
    return read_whole(name, value, low=1, high=_MOST, most="max_tokens")

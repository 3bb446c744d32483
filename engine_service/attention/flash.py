"""The FlashAttention libraries for long queries; short ones go to another backend.

Prompts are where they are fastest, and causal or unmasked is all they know. Block-causal prompts,
mixed masks and short queries are somebody else's, those beside prompts too: which backend that is,
is handed in. It does not know which libraries are installed.
"""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch.nn import functional

from engine_service.attention.base import (
    AttentionBackend,
    AttentionBatch,
    AttentionShape,
    LayerCache,
)
from engine_service.core.step import Span
from engine_service.kernels.cute_dsl import keep_compiled
from engine_service.kernels.page_ends import clear_page_ends
from engine_service.out_of_memory import is_out_of_memory

_LOG = logging.getLogger("tidemill.rank")

LONG_QUERIES = 64
"""Steps whose longest query is shorter do not fill FlashAttention's tiles of 64 to 192 queries."""
_WORTH_KEYS = 32768
"""From as many keys on, all of them together, a launch for the spans of few queries beside prompts
is worth its while (benchmarks/mixed_attention.py): a tile of FlashAttention has 128 queries or
more, whether they are there or not, but reads while others compute."""

_OWN_KEYS = 128
"""Of a tile of FlashAttention 4, where it chooses and heads have at most 128 values."""

_NO_AUX_DATA = r"Argument aux_data \(position \d+\) cannot be converted to a JitArgument"


class FlashPlan(NamedTuple):
    """A step that FlashAttention computes."""

    batch: AttentionBatch
    """The spans that it computes: the step's first ones."""
    window: int | None
    causal: bool
    """The last query of a span sees its last key, each one before it a key less; False: every
    query sees all keys of its span."""
    step: AttentionBatch
    """All spans."""
    few: object | None = None
    """How the other backend computes those of few queries; None: there is none behind `batch`."""


FlashCall = Callable[[torch.Tensor, LayerCache, FlashPlan, float], torch.Tensor]
"""(queries [T, H, D], cache, plan, softmax scale) to [T, H, D]."""


class FlashBackend(AttentionBackend):
    """bfloat16 and float16 on CUDA. Capturable where `short` is: steps that bring no spans on the
    host, as captured ones do not, go there.

    A failure before the first success is raised, so that a check at start-up sees it. A later one
    (a variant that does not compile) turns FlashAttention off for good, with one warning; memory
    that runs out is no failure of its own and is always raised.
    """

    name = "flash"

    def __init__(self, shape: AttentionShape, call: FlashCall, short: AttentionBackend) -> None:
        super().__init__(shape)
        self.capturable = short.capturable
        self._call = call
        self._short = short
        self._proven = False
        self._broken = False

    def empty_cache(self, num_pages: int, device: torch.device) -> LayerCache:
        """As short queries read it fastest; FlashAttention takes any strides."""
        return self._short.empty_cache(num_pages, device)

    def plan(self, batch: AttentionBatch, *, window: int | None) -> object:
        if batch.max_query_len >= LONG_QUERIES and batch.spans is not None and not self._broken:
            own = _first_spans(batch, batch.spans, self._short.few_queries)
            causal = _is_causal(own, window)
            if causal is not None:
                few = None if own is batch else self._short.plan_few(batch, window=window)
                return FlashPlan(own, window, causal, batch, few)
        return self._short.plan(batch, window=window)

    def attend(
        self, q_THD: torch.Tensor, *, cache: LayerCache, plan: object, scale: float
    ) -> torch.Tensor:
        if isinstance(plan, FlashPlan):
            if not self._broken:
                out = self._try(q_THD, cache, plan, scale)
                if out is not None:
                    if plan.few is not None:
                        self._short.attend_few(
                            q_THD, cache=cache, plan=plan.few, scale=scale, out_THD=out
                        )
                    return out
            # The rest of the step in which it broke.
            plan = self._short.plan(plan.step, window=plan.window)
        return self._short.attend(q_THD, cache=cache, plan=plan, scale=scale)

    def _try(
        self, q_THD: torch.Tensor, cache: LayerCache, plan: FlashPlan, scale: float
    ) -> torch.Tensor | None:
        try:
            out = self._call(q_THD, cache, plan, scale)
        except Exception as error:
            if not self._proven or is_out_of_memory(error):
                raise
            self._broken = True
            _LOG.warning(
                "FlashAttention failed and is off from now on, prompts will be slower: %s: %s",
                type(error).__name__,
                error,
            )
            return None
        self._proven = True
        return out


def _first_spans(batch: AttentionBatch, spans: Sequence[Span], few: int) -> AttentionBatch:
    """The step up to its last span of more than `few` queries; the whole step, where those behind
    it see too few keys to be worth a launch."""
    count = len(spans)
    while spans[count - 1].num_tokens <= few:
        count -= 1
    if sum(span.kv_len for span in spans[count:]) < _WORTH_KEYS:
        return batch
    own = spans[:count]
    return replace(
        batch,
        cu_seqlens_q=batch.cu_seqlens_q[: count + 1],
        kv_lens=batch.kv_lens[:count],
        mask_block=batch.mask_block[:count],
        page_table=batch.page_table[:count],
        all_causal=all(span.mask_block == 1 for span in own),
        spans=own,
    )


def _is_causal(batch: AttentionBatch, window: int | None) -> bool | None:
    """FlashPlan.causal, or None for masks that FlashAttention does not know."""
    spans = batch.spans or ()
    if batch.all_causal:
        return True if all(span.stop == span.kv_len for span in spans) else None
    sees_all = window is None and all(
        (span.start // span.mask_block + 1) * span.mask_block >= span.kv_len for span in spans
    )
    return False if sees_all else None


def page_tile(capability: tuple[int, int], page_size: int, head_dim: int) -> tuple[int, int] | None:
    """(queries, keys) of a tile of FlashAttention 4 whose keys are one page, so that it is loaded
    whole instead of slot by slot (benchmarks/flash_tiles.py). None: FlashAttention's own choice."""
    return (192, 64) if capability[0] == 9 and (page_size, head_dim) == (64, 128) else None


@lru_cache(maxsize=8)
def _tile_there(device: torch.device, page_size: int, head_dim: int) -> tuple[int, int] | None:
    return page_tile(torch.cuda.get_device_capability(device), page_size, head_dim)


def load_flash4() -> FlashCall:
    """flash-attn-4; a variant is compiled at its first call, in 2 s, and kept. Raises ImportError.

    Where a page is one of its key tiles, it reads what stands behind a span's end too: scores there
    are masked, but values must be finite.
    """
    keep_compiled()
    from flash_attn.cute import flash_attn_varlen_func, interface

    # Its public function has no say in tiles; this one may look different in another release.
    forward = getattr(interface, "_flash_attn_fwd", None)
    tiled = forward if forward and "tile_mn" in inspect.signature(forward).parameters else None
    # Its compiler warns so of an argument that we do not pass, whenever a variant is first needed.
    warnings.filterwarnings("ignore", message=_NO_AUX_DATA, category=UserWarning)

    def call(q_THD: torch.Tensor, cache: LayerCache, plan: FlashPlan, scale: float) -> torch.Tensor:
        batch, page_size = plan.batch, cache.k.shape[1]
        left, right = (None, None) if plan.window is None else (plan.window - 1, 0)
        tile = _tile_there(q_THD.device, page_size, cache.k.shape[3]) if tiled else None
        if tile is not None or page_size == _OWN_KEYS:
            clear_page_ends(cache.v, batch.page_table, batch.kv_lens)
        operands = (q_THD, cache.k, cache.v)
        # Without bounds on the lengths one compiled variant serves all steps.
        named = {
            "cu_seqlens_q": batch.cu_seqlens_q,
            "seqused_k": batch.kv_lens,
            "page_table": batch.page_table,
            "softmax_scale": scale,
            "causal": plan.causal,
        }
        if tiled is None or tile is None:
            return _first(flash_attn_varlen_func(*operands, **named, window_size=(left, right)))
        windows = {"window_size_left": left, "window_size_right": right}
        return _first(tiled(*operands, **named, **windows, tile_mn=tile))

    return call


def load_flash3() -> FlashCall:
    """FlashAttention 3, the Hopper build of the same project. Raises ImportError."""
    from flash_attn_interface import flash_attn_with_kvcache

    def call(q_THD: torch.Tensor, cache: LayerCache, plan: FlashPlan, scale: float) -> torch.Tensor:
        out = flash_attn_with_kvcache(
            q_THD,
            cache.k,
            cache.v,
            cache_seqlens=plan.batch.kv_lens,
            page_table=plan.batch.page_table,
            cu_seqlens_q=plan.batch.cu_seqlens_q,
            max_seqlen_q=plan.batch.max_query_len,
            softmax_scale=scale,
            causal=plan.causal,
            window_size=_window(plan),
        )
        return _first(out)

    return call


def load_flash2() -> FlashCall:
    """FlashAttention 2, for pages of multiples of 256 tokens. Raises ImportError."""
    from flash_attn import flash_attn_varlen_func

    def call(q_THD: torch.Tensor, cache: LayerCache, plan: FlashPlan, scale: float) -> torch.Tensor:
        out = flash_attn_varlen_func(
            q_THD,
            cache.k,
            cache.v,
            cu_seqlens_q=plan.batch.cu_seqlens_q,
            cu_seqlens_k=functional.pad(plan.batch.kv_lens.cumsum(0, dtype=torch.int32), (1, 0)),
            max_seqlen_q=plan.batch.max_query_len,
            max_seqlen_k=plan.batch.max_kv_len,
            softmax_scale=scale,
            causal=plan.causal,
            window_size=_window(plan),
            block_table=plan.batch.page_table,
        )
        return _first(out)

    return call


def _window(plan: FlashPlan) -> tuple[int, int]:
    """(keys before the query's own, keys behind it); -1 is no bound."""
    return (-1, -1) if plan.window is None else (plan.window - 1, 0)


def _first(out: torch.Tensor | tuple[torch.Tensor, ...]) -> torch.Tensor:
    """The attention output; some releases return log-sum-exps behind it."""
    return out[0] if isinstance(out, tuple) else out

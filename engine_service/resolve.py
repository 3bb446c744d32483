"""Turns an operator's wishes into final numbers, once, with a reason for each one chosen here.

Pure: the same config, traits and device give the same result. It reads no files and no hardware.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine_service.config import EngineConfig
from engine_service.core.step import FULL, granularity
from engine_service.launching import launch_bound
from engine_service.limits import check, role_refused
from engine_service.models.base import ModelTraits
from tidemill.ranges import require_at_least
from tidemill.runtime.errors import InvalidRequest

CANVAS_BLOCK = 32
"""Positions that a row of a full-canvas model decides on at once, unless a request says more."""
_MOST_STEPS_IN_ONE = 4
"""Of a model that a CUDA device computes sooner than the host launches it, so that prompts wait for
the host. docs/performance.md, "Longer steps of small models"."""
_LOGIT_CHUNK_BYTES = 256 << 20
"""float32 logits that exist at once; sampling needs about eight times as much beside them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Defaults:
    page_size: int
    max_rows: int
    token_budget: int


_CPU = _Defaults(page_size=16, max_rows=64, token_budget=1024)
_CUDA = _Defaults(page_size=64, max_rows=256, token_budget=8192)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig:
    """Sizes of an engine. Nobody edits them later."""

    page_size: int
    """Tokens per KV page; a divisor or multiple of the model's mask block."""
    max_rows: int
    max_model_len: int
    table_width: int
    """Positions per row: max_model_len rounded up to whole pages and whole mask blocks."""
    token_budget: int
    """Query tokens per step."""
    canvas_budget: int
    """Query tokens per step of canvases that are computed whole."""
    logit_budget: int
    """Rows of logits per step."""
    logit_chunk: int
    """Rows of logits in memory at once."""
    reasons: tuple[str, ...]
    """One line per number that the operator did not choose."""


def resolve(config: EngineConfig, traits: ModelTraits, device: torch.device) -> ResolvedConfig:
    """Fills in defaults by device and model and checks what the operator chose.

    Raises InvalidRequest naming the flag, the value, the limit and what to pass instead.
    """
    check(config)
    _check_role(config, traits)
    defaults = _CUDA if device.type == "cuda" else _CPU
    reasons: list[str] = []
    block = granularity(traits.mask_block)
    sees_all = traits.mask_block >= FULL
    page_size = _page_size(config.page_size, defaults.page_size, block, device, reasons)
    max_model_len = _max_model_len(config.max_model_len, traits, reasons)
    max_rows = config.max_rows
    if max_rows is None:
        max_rows = defaults.max_rows
        reasons.append(f"max_rows {max_rows}: default on {device.type}")
    token_budget = config.token_budget
    if token_budget is None:
        least = max_model_len if sees_all else max_rows * block
        token_budget = max(_step_tokens(defaults.token_budget, traits, device), least)
        reasons.append(
            f"token_budget {token_budget}: a whole canvas in one step"
            if sees_all
            else f"token_budget {token_budget}: one block of {block} per row, or more"
        )
    logit_budget = config.logit_budget
    if logit_budget is None:
        decided = CANVAS_BLOCK if sees_all else block
        logit_budget = max_rows * decided
        reasons.append(f"logit_budget {logit_budget}: {max_rows} rows x {decided} positions")
    require_at_least("token_budget", token_budget, block, "one block of the model")
    require_at_least("logit_budget", logit_budget, block, "one block of the model")
    unit = max(page_size, block)
    fitting = _LOGIT_CHUNK_BYTES // (4 * traits.vocab_size)
    return ResolvedConfig(
        page_size=page_size,
        max_rows=max_rows,
        max_model_len=max_model_len,
        table_width=-(-max_model_len // unit) * unit,
        token_budget=token_budget,
        canvas_budget=_canvas_budget(config.canvas_budget, token_budget),
        logit_budget=logit_budget,
        logit_chunk=min(logit_budget, max(block, fitting)),
        reasons=tuple(reasons),
    )


def _step_tokens(default: int, traits: ModelTraits, device: torch.device) -> int:
    """Twice as many as are computed for as long as they are launched, in a power of two steps."""
    steps = 1
    if device.type == "cuda":
        while steps < _MOST_STEPS_IN_ONE and steps * default <= launch_bound(traits.hidden_size):
            steps *= 2
    return default * steps


def _canvas_budget(chosen: int | None, token_budget: int) -> int:
    """Half of a step, so that canvases computed whole leave room for those that only step."""
    return max(1, token_budget // 2) if chosen is None else chosen


def _page_size(
    chosen: int | None, default: int, block: int, device: torch.device, reasons: list[str]
) -> int:
    if chosen is not None:
        if chosen % block and block % chosen:
            raise InvalidRequest(
                f"page_size {chosen} is neither a divisor nor a multiple of the model's block of"
                f" {block} tokens; pass --page-size {-(-chosen // block) * block}",
                param="page_size",
            )
        return chosen
    if default % block and block % default:
        page_size = -(-default // block) * block
        reasons.append(f"page_size {page_size}: {default} does not fit blocks of {block}")
        return page_size
    reasons.append(f"page_size {default}: default on {device.type}")
    return default


def _max_model_len(chosen: int | None, traits: ModelTraits, reasons: list[str]) -> int:
    if chosen is None:
        reasons.append(f"max_model_len {traits.max_model_len}: the checkpoint's limit")
        return traits.max_model_len
    if chosen > traits.max_model_len:
        raise InvalidRequest(
            f"max_model_len {chosen} exceeds the checkpoint's limit of {traits.max_model_len}"
            " tokens; pass that or less",
            param="max_model_len",
        )
    return chosen


def _check_role(config: EngineConfig, traits: ModelTraits) -> None:
    """Raises Unsupported where a prompt of this model has no KV that could be moved."""
    if config.role == "both":
        return
    if traits.mask_block >= FULL:
        raise role_refused(
            config,
            "every position of this model sees all others, so a prompt has no keys and values of "
            "its own that could be moved",
        )
    if not traits.methods:
        raise role_refused(config, "this model is an encoder and generates nothing")

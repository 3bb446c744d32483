"""Builds DecideBatches by hand: one decided position per row, tables from plain Python values.

It does not know the worker; tests of the sampler need no tables of the real kind.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any
from unittest.mock import patch

import torch

from engine_service.sampling import sampler
from engine_service.sampling.batch import DecideBatch, Wants
from engine_service.sampling.head import KnownLogits
from engine_service.sampling.rng import request_seed
from engine_service.sampling.tables import SamplingTables


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of the tables and the position it decides (default: right behind its tokens)."""

    tokens: list[int] = field(default_factory=lambda: [0])
    prompt_len: int = 1
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    choice: int = 0
    min_tokens: int = 0
    suppress: tuple[int, ...] = ()
    bias: dict[int, float] = field(default_factory=dict)


def make_tables(rows: list[Row], *, banned: tuple[int, ...] = (), width: int = 16):
    """Tables with one line per row."""
    slots = max(1, *(max(len(row.suppress), len(row.bias)) for row in rows))

    def column(name: str, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([getattr(row, name) for row in rows], dtype=dtype)

    def padded(values: list[list[float]], size: int, fill: float, dtype: torch.dtype):
        return torch.tensor([[*line, *[fill] * (size - len(line))] for line in values], dtype=dtype)

    floats = {
        name: column(name, torch.float32)
        for name in (
            "temperature",
            "top_p",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
        )
    }
    return SamplingTables(
        tokens=padded([row.tokens for row in rows], width, 0, torch.int64),
        fixed=torch.zeros(len(rows), width, dtype=torch.bool),
        prompt_lens=column("prompt_len", torch.int64),
        top_k=column("top_k", torch.int64),
        seeds=torch.tensor([request_seed(row.seed, row.choice) for row in rows]),
        min_tokens=column("min_tokens", torch.int64),
        suppress_ids=padded([list(row.suppress) for row in rows], slots, -1, torch.int64),
        bias_ids=padded([list(row.bias) for row in rows], slots, -1, torch.int64),
        bias_values=padded([list(row.bias.values()) for row in rows], slots, 0, torch.float32),
        banned_ids=torch.tensor(banned, dtype=torch.int64),
        **floats,
    )


def make_wants(rows: list[Row], *, logprobs: int | None = None) -> Wants:
    """What the rows need, without the host bound on top_k."""
    return Wants(
        sampling=any(row.temperature > 0 for row in rows),
        filters=any(row.top_p < 1 or row.top_k or row.min_p for row in rows),
        penalties=any(
            (row.repetition_penalty, row.presence_penalty, row.frequency_penalty) != (1, 0, 0)
            for row in rows
        ),
        bias=any(row.bias for row in rows),
        suppress=any(row.min_tokens for row in rows),
        max_logprobs=logprobs,
    )


def make_batch(
    logits: torch.Tensor,
    rows: list[Row],
    *,
    banned: tuple[int, ...] = (),
    wants: Wants | None = None,
    logprobs: int | None = None,
    positions: list[int] | None = None,
) -> DecideBatch:
    """Row i decides with logits[i]."""
    count = len(rows)
    numbers = torch.arange(count)
    return DecideBatch(
        logits=KnownLogits(logits),
        rows=numbers,
        positions=torch.tensor(positions or [len(row.tokens) for row in rows]),
        span_rows=numbers,
        cu_decide=torch.arange(count + 1),
        tables=make_tables(rows, banned=banned),
        wants=wants or make_wants(rows, logprobs=logprobs),
    )


def on_device(batch: DecideBatch, device: str) -> DecideBatch:
    """The batch with every tensor of it and of its tables on `device`."""

    def moved(of: Any) -> dict[str, torch.Tensor]:
        values = {item.name: getattr(of, item.name) for item in fields(of)}
        return {
            name: value.to(device)
            for name, value in values.items()
            if isinstance(value, torch.Tensor)
        }

    return replace(
        batch,
        **moved(batch),
        logits=KnownLogits(batch.logits_NV.to(device)),
        tables=replace(batch.tables, **moved(batch.tables)),
    )


def choosing_all() -> Any:
    """Inside, the head multiplies all decided positions, whatever the host says of how many are
    open."""
    return patch.object(sampler, "_num_chosen", lambda batch: len(batch.positions))

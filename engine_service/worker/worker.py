"""One device's worth of engine: everything from the checkpoint to decisions, behind `Executor`.

It does not know requests, connections or which methods exist; strategies are handed in.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from engine_service.attention.base import AttentionBackend, AttentionShape
from engine_service.attention.select import create_backend, pick_backend
from engine_service.config import EngineConfig
from engine_service.core.step import Decision, StepPlan
from engine_service.core.strategy import DecodeStrategy, ExecutorLimits
from engine_service.models.base import ModelTraits
from engine_service.resolve import resolve
from engine_service.worker.checkpoint import Report, fetch_checkpoint
from engine_service.worker.kv_pool import KVPool, KVRoom, count_pages, page_bytes
from engine_service.worker.memory import find_room
from engine_service.worker.runner import Runner, StepHandle
from engine_service.worker.tables import RowTables
from engine_service.worker.weights import load_model, read_traits, resolve_dtype
from tidemill.runtime.errors import InvalidRequest

StrategyMaker = Callable[[ModelTraits], Sequence[DecodeStrategy]]
"""Builds the decoding methods that a model can run."""


def pick_device(name: str) -> torch.device:
    """`auto` is CUDA when there is one; raises InvalidRequest for a device that is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = name.partition(":")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if kind == "cpu" and not index:
        return torch.device("cpu")
    if kind == "cuda" and (index or "0").isdecimal() and int(index or 0) < count:
        return torch.device("cuda", int(index or 0))
    raise InvalidRequest(
        f"device {name!r} is not here; there are: cpu"
        + "".join(f", cuda:{number}" for number in range(count)),
        param="device",
    )


class Worker:
    """Loads a model, sizes the KV pool and runs step plans.

    Public attributes are set once, at start-up: `checkpoint`, `traits`, `resolved`, `dtype`,
    `device`, `strategies` (by name), `limits`, `overlaps`, `stage_seconds`.
    """

    def __init__(
        self, config: EngineConfig, make_strategies: StrategyMaker, report: Report
    ) -> None:
        """Start-up in order: device, checkpoint, model, profile, KV, tables, strategies.

        `report(stage, done, total)` is called at the beginning of every stage and during long
        ones. Raises ServiceErrors that say what to change.
        """
        self._report = report
        self.stage_seconds: dict[str, float] = {}
        with self._stage("device"):
            self.device = pick_device(config.device)
            self.overlaps = self.device.type == "cuda"
            if self.overlaps:
                torch.cuda.set_device(self.device)
        with self._stage("checkpoint"):
            self.checkpoint = fetch_checkpoint(config, report)
            self.traits = read_traits(self.checkpoint)
            self.resolved = resolve(config, self.traits, self.device)
            self.dtype = resolve_dtype(config, self.traits, self.device)
        with self._stage("weights"):
            model = load_model(
                config, self.checkpoint, device=self.device, dtype=self.dtype, report=report
            )
        backend = self._create_backend(config)
        with self._stage("profile"):
            room = find_room(config, self.resolved, model, backend, self.device)
        with self._stage("kv"):
            pool = self._create_pool(config, room, backend)
        with self._stage("tables"):
            self.strategies = {made.name: made for made in make_strategies(self.traits)}
            tables = self._create_tables(pool)
            for strategy in self.strategies.values():
                strategy.bind(self.resolved.max_rows, self.device)
        self.limits = ExecutorLimits(
            num_pages=pool.num_pages,
            page_size=self.resolved.page_size,
            max_rows=self.resolved.max_rows,
            max_model_len=self.resolved.max_model_len,
        )
        self._runner = Runner(
            model=model,
            backend=backend,
            caches=pool.caches,
            tables=tables,
            strategies=tuple(self.strategies.values()),
            logit_chunk=self.resolved.logit_chunk,
        )

    def launch(self, plan: StepPlan) -> StepHandle:
        """Starts a step."""
        return self._runner.launch(plan)

    def collect(self, handle: StepHandle) -> list[Decision | None]:
        """Waits for a step's decisions, one per span."""
        return self._runner.collect(handle)

    def facts(self) -> dict[str, Any]:
        """The fields of EngineFacts that loading has found."""
        checkpoint, traits, resolved = self.checkpoint, self.traits, self.resolved
        return {
            "model_id": checkpoint.model_id,
            "weight_version": checkpoint.weight_version,
            "architecture": traits.architecture,
            "dtype": str(self.dtype).removeprefix("torch."),
            "device": str(self.device),
            "vocab_size": traits.vocab_size,
            "max_model_len": resolved.max_model_len,
            "max_rows": resolved.max_rows,
            "page_size": resolved.page_size,
            "num_pages": self.limits.num_pages,
            "methods": tuple(self.strategies),
            "block_length": traits.mask_block,
            "mask_token_id": traits.mask_token_id,
            "eos_token_ids": traits.eos_token_ids,
            "tokenizer_dir": checkpoint.tokenizer_dir,
            "stage_seconds": dict(self.stage_seconds),
        }

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        self._report(name, 0, 0)
        began = time.monotonic()
        yield
        self.stage_seconds[name] = time.monotonic() - began

    def _create_backend(self, config: EngineConfig) -> AttentionBackend:
        traits = self.traits
        shape = AttentionShape(
            num_heads=traits.num_heads,
            num_kv_heads=traits.num_kv_heads,
            head_dim=traits.head_dim,
            page_size=self.resolved.page_size,
            dtype=self.dtype,
        )
        name = pick_backend(config.attention_backend, device_type=self.device.type)
        return create_backend(name, shape)

    def _create_pool(self, config: EngineConfig, room: KVRoom, backend: AttentionBackend) -> KVPool:
        resolved, num_layers = self.resolved, self.traits.num_layers
        num_pages = count_pages(
            room,
            requested=config.num_pages,
            bytes_per_page=page_bytes(backend.shape, num_layers),
            pages_per_row=resolved.table_width // resolved.page_size,
            page_size=resolved.page_size,
            max_rows=resolved.max_rows,
        )
        return KVPool(backend, num_layers, num_pages, self.device)

    def _create_tables(self, pool: KVPool) -> RowTables:
        return RowTables(
            max_rows=self.resolved.max_rows,
            table_width=self.resolved.table_width,
            page_size=self.resolved.page_size,
            trash_page=pool.trash_page,
            mask_token_id=self.traits.mask_token_id,
            methods=tuple(self.strategies),
            device=self.device,
        )

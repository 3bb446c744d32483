"""One device's worth of engine: everything from the checkpoint to decisions, behind `Executor`.

It does not know requests, connections or which methods exist; strategies are handed in.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from engine_service.attention.base import AttentionBackend, AttentionShape, LayerCache
from engine_service.attention.select import open_backend
from engine_service.config import EngineConfig
from engine_service.core.pooling import Pooling
from engine_service.core.step import Decisions, StepPlan
from engine_service.core.strategy import DecodeStrategy, ExecutorLimits
from engine_service.distributed import Group, Store, meet
from engine_service.models.base import CausalModel, ModelTraits
from engine_service.models.sharing import check_fit
from engine_service.out_of_memory import is_out_of_memory
from engine_service.place import FIRST, Place
from engine_service.resolve import resolve
from engine_service.worker.alike import check_alike
from engine_service.worker.buckets import Bucket, buckets_of
from engine_service.worker.build_kernels import build_kernels
from engine_service.worker.checkpoint import Report, fetch_checkpoint
from engine_service.worker.device import (
    agree_on_kernels,
    num_beside,
    open_device,
    start_without_failing_kernels,
)
from engine_service.worker.graphs import StepGraphs, capture_steps
from engine_service.worker.kv_pool import (
    KVPool,
    KVRoom,
    count_pages,
    no_pages,
    open_cache_aside,
    page_bytes,
)
from engine_service.worker.memory import decides_in_pieces, find_room, free_bytes
from engine_service.worker.pool_facts import read_pool_facts
from engine_service.worker.pool_rows import PoolRows
from engine_service.worker.program import StepProgram
from engine_service.worker.rank_pages import RankPages, read_layout
from engine_service.worker.runner import Runner, StepHandle
from engine_service.worker.shortage import (
    graphs_advice,
    pool_advice,
    profile_advice,
    start_up_shortage,
    step_shortage,
    weights_advice,
)
from engine_service.worker.tables import RowTables
from engine_service.worker.weights import check_files, load_model, read_traits, resolve_dtype

_LOG = logging.getLogger("tidemill.rank")

StrategyMaker = Callable[[ModelTraits], Sequence[DecodeStrategy]]
"""Builds the decoding methods that a model can run."""


class Worker:
    """Loads a model, sizes the KV pool and runs step plans.

    Public attributes are set once, at start-up: `checkpoint`, `traits`, `resolved`, `dtype`,
    `device`, `strategies` (by name), `limits`, `depth`, `kv_bytes`, `pages`, `stage_seconds`.
    """

    def __init__(
        self,
        config: EngineConfig,
        make_strategies: StrategyMaker,
        report: Report,
        place: Place = FIRST,
        store: Store | None = None,
    ) -> None:
        """Start-up in order: device, checkpoint, model, profile, KV, tables, strategies,
        kernels, graphs.

        `place`: which rank of several this is, that all start up in step with each other; rank 0
        brings the `store` at which they meet.
        `report(stage, done, total)` is called at the beginning of every stage and during long
        ones. Raises ServiceErrors that say what to change.
        """
        self._report = report
        self.stage_seconds: dict[str, float] = {}
        with self._stage("device"):
            self.device = open_device(config.device, place.local_rank)
            self.depth = num_beside(config.pipeline_parallel_size, self.device)
        with self._stage("checkpoint"):
            self.checkpoint = fetch_checkpoint(config, report)
            self.traits = read_traits(self.checkpoint)
            size = place.size // max(1, num_stages := config.pipeline_parallel_size)
            share = Group(place.rank % size, size, whole_experts=config.expert_parallel)
            check_files(config, self.checkpoint, share)
            check_fit(self.checkpoint.hf_config, self.traits, share, num_stages)
            self.resolved = resolve(config, self.traits, self.device)
            self.dtype = self._resolve_dtype(config)
        with self._stage("ranks"):
            rows, width = self.resolved.token_budget, self.traits.hidden_size
            group = meet(place, self.device, store, num_stages=num_stages)
            group = replace(group, whole_experts=share.whole_experts)
            check_alike(group, self.checkpoint, self.traits, self.resolved, self.dtype)
            agree_on_kernels(self.device, group)
            self._num_layers = len(group.stage.layers(self.traits.num_layers))
            self.group = group.with_peers(rows, width, self.dtype, self.device)
        with self._stage(
            "weights", lambda: weights_advice(self.checkpoint, self.traits, self.dtype, self.group)
        ):
            where: dict[str, Any] = {"device": self.device, "dtype": self.dtype}
            model = load_model(config, self.checkpoint, report=report, group=self.group, **where)
        self.strategies = {made.name: made for made in make_strategies(self.traits)}
        self._runner, pool = start_without_failing_kernels(
            self.device, self.group, lambda: self._start(config, model)
        )
        self.kv_bytes = pool.num_bytes
        self.pages = RankPages(pool.k, pool.v, self.traits, self.group, self.device)

    def launch(self, plan: StepPlan) -> StepHandle:
        """Starts a step; raises EngineDead where memory runs out."""
        try:
            return self._runner.launch(plan)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise step_shortage(plan, self.resolved) from error

    def collect(self, handle: StepHandle) -> Decisions:
        """Waits for a step's decisions."""
        return self._runner.collect(handle)

    def close(self) -> None:
        """Behind the last step: what other ranks could not take leave of."""
        self._runner.close(shares_layers=self.group.size > 1)

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
            "pooling": read_pool_facts(checkpoint, traits),
            "kv_layout": read_layout(checkpoint, traits, self.dtype, resolved.page_size),
        }

    def _start(self, config: EngineConfig, model: CausalModel) -> tuple[Runner, KVPool]:
        """What runs steps, with all kernels built and captured, and where their KV is."""
        program, buckets, pool = self._make_program(config, model)
        with self._stage("kernels", lambda: pool_advice(self.resolved)):
            build_kernels(program, self.resolved)
        graphs = self._capture(program, buckets)
        return Runner(program, logit_chunk=self.resolved.logit_chunk, graphs=graphs), pool

    def _make_program(
        self, config: EngineConfig, model: CausalModel
    ) -> tuple[StepProgram, list[Bucket], KVPool]:
        """What a step runs on, and what of it is to be captured."""
        with self._stage("profile", lambda: profile_advice(self.resolved)):
            backend, buckets, cache_aside, room = self._profile(config, model)
        with self._stage("kv", lambda: pool_advice(self.resolved)):
            pool = self._create_pool(config, room, backend)
        with self._stage("tables", lambda: pool_advice(self.resolved)):
            tables = self._create_tables(pool, in_pieces=decides_in_pieces(model))
            for strategy in self.strategies.values():
                strategy.bind(self.resolved.max_rows, self.device)
        self.limits = ExecutorLimits(
            num_pages=pool.num_pages,
            page_size=self.resolved.page_size,
            max_rows=self.resolved.max_rows,
            max_model_len=self.resolved.max_model_len,
        )
        program = StepProgram(
            model=model,
            backend=backend,
            caches=pool.caches,
            tables=tables,
            strategies=tuple(self.strategies.values()),
            cache_aside=cache_aside,
            stage=self.group.stage,
        )
        return program, buckets, pool

    @contextmanager
    def _stage(self, name: str, advice: Callable[[], str] | None = None) -> Iterator[None]:
        """`advice` says what to change when the stage runs out of memory."""
        self._report(name, 0, 0)
        began = time.monotonic()
        free = 0 if advice is None else free_bytes(self.device)
        try:
            yield
        except Exception as error:
            if advice is None or not is_out_of_memory(error):
                raise
            raise start_up_shortage(advice(), self.device, free) from error
        self.stage_seconds[name] = time.monotonic() - began

    def _resolve_dtype(self, config: EngineConfig) -> torch.dtype:
        cuda = self.device.type == "cuda"
        compute = torch.cuda.get_device_capability(self.device) if cuda else None
        dtype = resolve_dtype(config, self.traits, self.device, compute=compute)
        name = str(dtype).removeprefix("torch.")
        if cuda and config.dtype == "auto" and name != self.traits.dtype:
            _LOG.warning("dtype %s: this GPU has no %s", name, self.traits.dtype)
        return dtype

    def _profile(
        self, config: EngineConfig, model: CausalModel
    ) -> tuple[AttentionBackend, list[Bucket], LayerCache | None, KVRoom]:
        """What computes attention, what is captured, where canvases are computed aside of the
        pages, and the memory that a step leaves."""
        backend, stage = self._create_backend(config), self.group.stage
        buckets = self._list_buckets(config, backend, decides_in_pieces(model))
        cache_aside = open_cache_aside(backend, self.resolved, self.traits, self.device)
        room = find_room(config, self.resolved, model, backend, self.device, buckets, stage)
        return backend, buckets, cache_aside, room

    def _create_backend(self, config: EngineConfig) -> AttentionBackend:
        traits = self.traits
        shape = AttentionShape(
            num_heads=traits.num_heads // self.group.size,
            num_kv_heads=max(1, traits.num_kv_heads // self.group.size),
            head_dim=traits.head_dim,
            page_size=self.resolved.page_size,
            dtype=self.dtype,
        )
        backend, reason = open_backend(
            config.attention_backend, shape, self.device, windows=self.traits.windows
        )
        _LOG.info("attention %s", reason)
        return backend

    def _list_buckets(
        self, config: EngineConfig, backend: AttentionBackend, in_pieces: bool
    ) -> list[Bucket]:
        """What is captured; nothing where there are no graphs or none are wanted."""
        if self.device.type != "cuda" or config.enforce_eager or not backend.capturable:
            return []
        strategies, num_stages = self.strategies.values(), self.group.stage.count
        return buckets_of(self.traits, self.resolved, strategies, in_pieces, num_stages)

    def _capture(self, program: StepProgram, buckets: Sequence[Bucket]) -> StepGraphs | None:
        # Ranks that wait for each other within a step pad it alike, and cut it alike.
        if not all(self.group.all_of(bool(buckets))):
            return None
        chunk, is_alone = self.resolved.logit_chunk, self.group.num_all == 1
        with self._stage("graphs", graphs_advice):
            return capture_steps(program, buckets, chunk, self._report, is_alone=is_alone)

    def _create_pool(self, config: EngineConfig, room: KVRoom, backend: AttentionBackend) -> KVPool:
        resolved, num_layers = self.resolved, self._num_layers
        if not self.traits.methods:
            return KVPool(backend, num_layers, no_pages(config), self.device)
        num_pages = count_pages(
            room,
            requested=config.num_pages,
            bytes_per_page=page_bytes(backend.shape, num_layers),
            pages_per_row=resolved.table_width // resolved.page_size,
            page_size=resolved.page_size,
            max_rows=resolved.max_rows,
        )
        num_pages = min(self.group.all_of(num_pages))
        return KVPool(backend, num_layers, num_pages, self.device)

    def _create_tables(self, pool: KVPool, *, in_pieces: bool) -> RowTables:
        return RowTables(
            max_rows=self.resolved.max_rows,
            table_width=self.resolved.table_width,
            page_size=self.resolved.page_size,
            trash_page=pool.trash_page,
            mask_token_id=self.traits.mask_token_id,
            methods=(*self.strategies, Pooling.name),
            device=self.device,
            in_pieces=in_pieces,
            pooled=PoolRows(self.resolved.max_rows, self.traits.hidden_size, self.device),
        )

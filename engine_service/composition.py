"""The composition root: the one file that knows every class. It does not know processes or gRPC."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from engine_service.config import EngineConfig
from engine_service.core.messages import EngineFacts
from engine_service.core.params import SamplingParams
from engine_service.core.step import Memory
from engine_service.core.strategy import DecodeStrategy, Executor, ExecutorLimits, ModelFacts
from engine_service.defaults import read_knobs, read_sampling
from tidemill.runtime.errors import InvalidRequest

if TYPE_CHECKING:
    from engine_service.core.constraint import Grammars, MaskMaker
    from engine_service.core.control import Profiler
    from engine_service.core.pool_admission import Reception
    from engine_service.core.scheduler import Scheduler
    from engine_service.worker.checkpoint import Checkpoint, Report


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """An engine without its surroundings: what a loop needs, in a process or in a library."""

    scheduler: Scheduler
    executor: Executor
    profiler: Profiler | None
    """None: there is nothing to profile."""
    facts: EngineFacts
    memory: Callable[[], Memory]
    """What of the device's memory is in use now."""


def compose(config: EngineConfig, report: Report) -> Engine:
    """Loads everything that `config` names. `report(stage, done, total)` hears the progress.

    Imports torch, which takes seconds: therefore not at the top. Raises ServiceErrors that say
    what to change.
    """
    from engine_service.core.constraint import MaskMaker
    from engine_service.core.pages import PageManager
    from engine_service.core.params import SchedulerLimits
    from engine_service.core.scheduler import Scheduler

    parts = _simulate(config, report) if config.executor == "simulated" else _load(config, report)
    facts, resolved = parts.facts, parts.resolved
    masks = MaskMaker(_make_grammars(config, parts))
    scheduler = Scheduler(
        admission=_make_reception(config, parts, masks),
        masks=masks,
        pages=PageManager(
            facts.num_pages,
            facts.page_size,
            prefix_caching=config.prefix_caching,
            weight_version=facts.weight_version,
        ),
        limits=SchedulerLimits(
            max_rows=facts.max_rows,
            token_budget=resolved.token_budget,
            logit_budget=resolved.logit_budget,
            canvas_budget=resolved.canvas_budget,
            max_queued_requests=config.max_queued_requests,
            max_queued_tokens=config.max_queued_tokens,
            max_queue_delay_s=config.max_queue_delay_s,
            age_bound_s=config.age_bound_s,
        ),
    )
    return Engine(
        scheduler=scheduler,
        executor=parts.executor,
        profiler=_make_profiler(config, facts),
        facts=facts,
        memory=parts.memory,
    )


def _make_profiler(config: EngineConfig, facts: EngineFacts) -> Profiler | None:
    from engine_service.worker.profiler import TorchProfiler

    if config.executor == "simulated":
        return None
    return TorchProfiler(records_cuda=facts.device.startswith("cuda"))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """What differs between a model and a simulation."""

    executor: Executor
    facts: EngineFacts
    resolved: Any
    strategies: dict[str, DecodeStrategy]
    memory: Callable[[], Memory] = Memory


def _make_grammars(config: EngineConfig, parts: _Parts) -> Grammars | None:
    """None where no logits are computed that a mask could act on."""
    from engine_service.constraints.llguidance import LlGrammars

    facts = parts.facts
    if config.executor == "simulated":
        return None
    return LlGrammars(
        facts.tokenizer_dir,
        vocab_size=facts.vocab_size,
        eos_token_ids=facts.eos_token_ids,
    )


def _make_reception(config: EngineConfig, parts: _Parts, masks: MaskMaker) -> Reception:
    from engine_service.core.admission import Admission, Capacity
    from engine_service.core.pool_admission import PoolAdmission, Reception

    facts, resolved = parts.facts, parts.resolved
    model = ModelFacts(
        vocab_size=facts.vocab_size,
        max_model_len=facts.max_model_len,
        eos_token_ids=facts.eos_token_ids,
        max_logprobs=facts.max_logprobs,
        weight_version=facts.weight_version,
        mask_token_id=facts.mask_token_id,
    )
    capacity = Capacity(
        num_pages=facts.num_pages,
        page_size=facts.page_size,
        token_budget=resolved.token_budget,
        logit_budget=resolved.logit_budget,
        span_logits=resolved.logit_chunk,
    )
    generation = pooling = None
    if parts.strategies:
        generation = Admission(
            model=model,
            grammars=masks.grammars,
            capacity=capacity,
            strategies=parts.strategies,
            default_method=facts.default_method,
            default_params=config.default_params,
            defaults=facts.default_sampling,
            seed=config.seed,
        )
    if facts.pooling is not None:
        pooling = PoolAdmission(
            model=model, capacity=capacity, mask_block=facts.block_length, facts=facts.pooling
        )
    return Reception(architecture=facts.architecture, generation=generation, pooling=pooling)


def _load(config: EngineConfig, report: Report) -> _Parts:
    import torch

    from engine_service.worker.memory import memory_in_use
    from engine_service.worker.worker import Worker

    torch.set_num_threads(_num_threads())
    worker = Worker(config, _make_strategies, report)
    found = worker.facts()
    facts = _facts(config, found, worker.traits, worker.checkpoint, worker.strategies)
    return _Parts(
        executor=worker,
        facts=facts,
        resolved=worker.resolved,
        strategies=worker.strategies,
        memory=partial(memory_in_use, worker.device, worker.kv_bytes),
    )


def _simulate(config: EngineConfig, report: Report) -> _Parts:
    import torch

    from engine_service.resolve import resolve
    from engine_service.simulated import SimulatedExecutor
    from engine_service.worker.checkpoint import fetch_checkpoint
    from engine_service.worker.weights import read_traits

    checkpoint = fetch_checkpoint(replace(config, load_format="dummy"), report)
    traits = read_traits(checkpoint)
    resolved = resolve(config, traits, torch.device("cpu"))
    strategies = {made.name: made for made in _make_strategies(traits)}
    pages_per_row = resolved.table_width // resolved.page_size
    num_pages = config.num_pages or resolved.max_rows * pages_per_row
    limits = ExecutorLimits(
        num_pages, resolved.page_size, resolved.max_rows, resolved.max_model_len
    )
    executor = SimulatedExecutor(
        limits,
        vocab_size=traits.vocab_size,
        step_s=config.simulated_step_ms / 1000,
        never=frozenset(one for one in (*traits.eos_token_ids, traits.mask_token_id) if one),
    )
    found = {
        "model_id": checkpoint.model_id,
        "weight_version": checkpoint.weight_version,
        "architecture": traits.architecture,
        "dtype": "none",
        "device": "simulated",
        "vocab_size": traits.vocab_size,
        "max_model_len": resolved.max_model_len,
        "max_rows": resolved.max_rows,
        "page_size": resolved.page_size,
        "num_pages": num_pages,
        "methods": tuple(strategies),
        "block_length": traits.mask_block,
        "mask_token_id": traits.mask_token_id,
        "eos_token_ids": traits.eos_token_ids,
        "tokenizer_dir": checkpoint.tokenizer_dir,
        "stage_seconds": {},
        "pooling": None,
    }
    facts = _facts(config, found, traits, checkpoint, strategies)
    return _Parts(executor=executor, facts=facts, resolved=resolved, strategies=strategies)


def _make_strategies(traits: Any) -> list[DecodeStrategy]:
    from engine_service import decoding

    kinds: dict[str, Any] = decoding.strategies()
    return [
        kinds[name].for_model(
            mask_block=traits.mask_block,
            mask_token_id=traits.mask_token_id,
            logits_shift=traits.logits_shift,
            eos_token_ids=traits.eos_token_ids,
        )
        for name in traits.methods
    ]


def _facts(
    config: EngineConfig,
    found: dict[str, Any],
    traits: Any,
    checkpoint: Checkpoint,
    strategies: dict[str, DecodeStrategy],
) -> EngineFacts:
    method = config.default_method or traits.default_method
    if method not in strategies and (strategies or config.default_method):
        raise InvalidRequest(
            f"default_method {method!r} is not one of this model's: "
            f"{', '.join(strategies) or 'none, it is an encoder'}",
            param="default_method",
        )
    defaults = SamplingParams()
    if config.generation_config == "auto":
        defaults = read_sampling(checkpoint.generation_config)
    return EngineFacts(
        **found,
        max_queued_requests=config.max_queued_requests,
        max_logprobs=config.max_logprobs,
        prefix_caching=config.prefix_caching,
        default_method=method,
        default_params=read_knobs(config, strategies.get(method)),
        default_sampling=defaults,
    )


def _num_threads() -> int:
    """OMP_NUM_THREADS when it is set, else the cores this process may use."""
    return int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0)))

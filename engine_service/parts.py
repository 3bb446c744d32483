"""What of an engine differs between a model and a simulation: loads either, whole.

It does not know what is made of it. Imports torch, which takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from engine_service.config import EngineConfig
from engine_service.core.facts import EngineFacts
from engine_service.core.messages import RankTrace
from engine_service.core.pages import PageManager
from engine_service.core.step import Memory
from engine_service.core.strategy import DecodeStrategy, Executor, ExecutorLimits
from engine_service.core.transfers import Transfers
from engine_service.defaults import read_knobs, sampling_defaults
from engine_service.distributed import Group, Store
from engine_service.limits import check_count
from engine_service.model_folder import folder_of
from engine_service.models.base import ModelTraits
from engine_service.models.sharing import check_fit
from engine_service.nodes import check_nodes
from engine_service.place import FIRST, Place
from engine_service.rank_worker import make_strategies, make_transfers, open_worker
from engine_service.ranks.choice import hosts_of
from engine_service.ranks.group import open_group
from engine_service.ranks.hosts import Hosts
from engine_service.resolve import ResolvedConfig, resolve
from engine_service.simulated import SimulatedExecutor
from engine_service.worker.checkpoint import Checkpoint, Report, fetch_checkpoint
from engine_service.worker.memory import memory_in_use
from engine_service.worker.weights import check_files, read_traits
from tidemill.runtime.errors import InvalidRequest, ServiceError, Unsupported


def _nothing() -> None:
    """There is one process, and it ends itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What differs between a model and a simulation."""

    executor: Executor
    facts: EngineFacts
    resolved: ResolvedConfig
    strategies: dict[str, DecodeStrategy]
    memory: Callable[[], Memory] = Memory
    close: Callable[[], object] = _nothing
    away: Callable[[], AbstractContextManager[None]] = nullcontext
    """Around what holds this process's interpreter for seconds: other ranks watch it."""
    others: Callable[[], Sequence[RankTrace]] = tuple
    make_transfers: Callable[[PageManager, EngineFacts], Transfers] | None = None
    """None: there is no KV that could be moved."""


def load(
    config: EngineConfig,
    report: Report,
    place: Place | None,
    store: Store | None,
    on_lost: Callable[[ServiceError], None] | None,
) -> Parts:
    """A model on this machine's devices; see composition.compose. Raises ServiceErrors that say
    what to change."""
    executor: Any
    close, others, away = _nothing, tuple, nullcontext
    num_ranks = config.num_ranks
    check_count(config.tensor_parallel_size, num_ranks)
    hosts = hosts_of(config, num_ranks, ends_silent_leader=on_lost is not None)
    if place is not None and num_ranks > 1 and config.role != "both":
        text = f"role is {config.role!r}, and only rank 0 of ranks that it starts itself moves KV"
        raise Unsupported(f"{text}; leave out the place, or pass role 'both'", param="role")
    if place is not None or num_ranks == 1:
        executor = worker = open_worker(config, report, place=place or FIRST, store=store)
        close = _nothing if place is None else worker.close
    else:
        _check_split(config, hosts, report)
        ways: dict[str, Any] = {"open_worker": open_worker, "hosts": hosts, "on_lost": on_lost}
        executor = open_group(config, num_ranks, report, **ways)
        worker, close, others = executor.own, executor.close, executor.rank_times
        away = executor.away
    found = worker.facts()
    try:
        facts = _facts(config, found, worker.traits, worker.checkpoint, worker.strategies)
    except ServiceError:
        close()  # whoever keeps the error would keep the ranks
        raise
    return Parts(
        executor=executor,
        facts=facts,
        resolved=worker.resolved,
        strategies=worker.strategies,
        memory=partial(memory_in_use, worker.device, worker.kv_bytes),
        close=close,
        away=away,
        others=others,
        make_transfers=partial(make_transfers, worker, executor),
    )


def _check_split(config: EngineConfig, hosts: Hosts, report: Report) -> None:
    """Raises what the first rank would once all others have come: of several hosts that may be half
    an hour, for a number of ranks that no start of this model ever has, files that are not whole,
    or defaults that no request may have. Reads no weights."""
    checkpoint = fetch_checkpoint(replace(config, load_format="dummy"), report)
    traits = read_traits(checkpoint)
    group = Group(0, config.tensor_parallel_size, whole_experts=config.expert_parallel)
    if folder_of(config.model) is not None:
        check_files(config, checkpoint, group)
    else:  # they may not be here yet
        sampling_defaults(config, checkpoint.generation_config)
    room = {"most_ranks": hosts.most_ranks(), "num_nodes": hosts.num_nodes}
    check_fit(checkpoint.hf_config, traits, group, config.pipeline_parallel_size, **room)
    strategies = {made.name: made for made in make_strategies(traits)}
    read_knobs(config, strategies.get(_default_method(config, traits, strategies)))


def simulate(config: EngineConfig, report: Report) -> Parts:
    """A model's facts and tokenizer, and steps that only take their time. Raises InvalidRequest for
    flags of several hosts, which there are none of."""
    check_nodes(config)
    checkpoint = fetch_checkpoint(replace(config, load_format="dummy"), report)
    traits = read_traits(checkpoint)
    resolved = resolve(config, traits, torch.device("cpu"))
    strategies = {made.name: made for made in make_strategies(traits)}
    pages_per_row = resolved.table_width // resolved.page_size
    num_pages = config.num_pages or resolved.max_rows * pages_per_row
    limits = ExecutorLimits(
        num_pages, resolved.page_size, resolved.max_rows, resolved.max_model_len
    )
    executor = SimulatedExecutor(
        limits,
        vocab_size=traits.vocab_size,
        step_s=config.simulated_step_ms / 1000,
        never=frozenset(
            one for one in (*traits.eos_token_ids, traits.mask_token_id) if one is not None
        ),
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
    return Parts(executor=executor, facts=facts, resolved=resolved, strategies=strategies)


def _facts(
    config: EngineConfig,
    found: dict[str, Any],
    traits: ModelTraits,
    checkpoint: Checkpoint,
    strategies: dict[str, DecodeStrategy],
) -> EngineFacts:
    method = _default_method(config, traits, strategies)
    return EngineFacts(
        **found,
        max_queued_requests=config.max_queued_requests,
        max_logprobs=config.max_logprobs,
        prefix_caching=config.prefix_caching,
        tensor_parallel_size=config.tensor_parallel_size,
        pipeline_parallel_size=config.pipeline_parallel_size,
        expert_parallel=config.expert_parallel,
        role=config.role,
        default_method=method,
        default_params=read_knobs(config, strategies.get(method)),
        default_sampling=sampling_defaults(config, checkpoint.generation_config),
        approximate_caches=tuple(
            name for one in strategies.values() for name in one.approximate_caches
        ),
    )


def _default_method(
    config: EngineConfig, traits: ModelTraits, strategies: Mapping[str, DecodeStrategy]
) -> str:
    """Raises InvalidRequest for one that the model does not have."""
    method = config.default_method or traits.default_method
    if method not in strategies and (strategies or config.default_method):
        raise InvalidRequest(
            f"default_method {method!r} is not one of this model's: "
            f"{', '.join(strategies) or 'none, it is an encoder'}",
            param="default_method",
        )
    return method

"""The composition root: the one file that knows every class. It does not know processes or gRPC."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine_service.config import EngineConfig
from engine_service.core.facts import EngineFacts
from engine_service.core.messages import RankTrace
from engine_service.core.step import Memory
from engine_service.core.strategy import Executor, ModelFacts
from engine_service.hf_overrides import check_overrides
from engine_service.model_folder import check_model
from tidemill.runtime.errors import ServiceError

if TYPE_CHECKING:
    from engine_service.core.constraint import Grammars, MaskMaker
    from engine_service.core.control import Profiler, Transferring
    from engine_service.core.pages import PageManager
    from engine_service.core.params import SchedulerLimits
    from engine_service.core.pool_admission import Reception
    from engine_service.core.scheduler import Scheduler
    from engine_service.distributed import Store
    from engine_service.parts import Parts
    from engine_service.place import Place
    from engine_service.worker.checkpoint import Report


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """An engine without its surroundings: what a loop needs, in a process or in a library."""

    scheduler: Scheduler
    limits: SchedulerLimits
    executor: Executor
    profiler: Profiler | None
    """None: there is nothing to profile."""
    transfers: Transferring | None
    """None: its role moves no KV."""
    facts: EngineFacts
    memory: Callable[[], Memory]
    """What of the device's memory is in use now."""
    others: Callable[[], Sequence[RankTrace]]
    """What other ranks have told of timed steps since the last time."""
    close: Callable[[], object]
    """Ends the other ranks' processes, if there are any."""


def compose(
    config: EngineConfig,
    report: Report,
    place: Place | None = None,
    store: Store | None = None,
    *,
    on_lost: Callable[[ServiceError], None] | None = None,
) -> Engine:
    """Loads everything that `config` names. `report(stage, done, total)` hears the progress.

    `place` and `store` (worker.Worker): whoever gives them runs a whole engine per rank, all on the
    same requests; otherwise the other ranks are started here and told each step.
    `on_lost` hears from another thread, while this one may be waiting for it for ever, that a rank
    is lost, and should end the process; without it the next step raises EngineDead.

    Imports torch, which takes seconds: therefore not at the top. Raises ServiceErrors that say
    what to change.
    """
    check_overrides(config.hf_overrides)
    check_model(config.model)
    from engine_service.core.constraint import MaskMaker
    from engine_service.core.scheduler import Scheduler
    from engine_service.parts import load, simulate

    if config.executor == "simulated":
        parts = simulate(config, report)
    else:
        parts = load(config, report, place, store, on_lost)
    facts = parts.facts
    masks = MaskMaker(_make_grammars(config, parts))
    pages = _make_pages(config, facts)
    limits = _limits(config, parts)
    scheduler = Scheduler(
        admission=_make_reception(config, parts, masks),
        masks=masks,
        pages=pages,
        limits=limits,
    )
    makes = None if config.role == "both" else parts.make_transfers
    return Engine(
        scheduler=scheduler,
        limits=limits,
        executor=parts.executor,
        profiler=_make_profiler(config, parts),
        transfers=None if makes is None else makes(pages, facts),
        facts=facts,
        memory=parts.memory,
        others=parts.others,
        close=parts.close,
    )


def _make_pages(config: EngineConfig, facts: EngineFacts) -> PageManager:
    from engine_service.core.pages import PageManager

    return PageManager(
        facts.num_pages,
        facts.page_size,
        prefix_caching=config.prefix_caching,
        weight_version=facts.weight_version,
    )


def _limits(config: EngineConfig, parts: Parts) -> SchedulerLimits:
    from engine_service.core.params import SchedulerLimits

    facts, resolved, depth = parts.facts, parts.resolved, parts.executor.depth
    return SchedulerLimits(
        max_rows=facts.max_rows,
        token_budget=resolved.token_budget,
        logit_budget=resolved.logit_budget,
        canvas_budget=resolved.canvas_budget,
        max_queued_requests=config.max_queued_requests,
        max_queued_tokens=config.max_queued_tokens,
        max_queue_delay_s=config.max_queue_delay_s,
        age_bound_s=config.age_bound_s,
        num_cohorts=1 if config.pipeline_parallel_size == 1 else depth + 1,
    )


def _make_profiler(config: EngineConfig, parts: Parts) -> Profiler | None:
    from engine_service.worker.profiler import TorchProfiler

    if config.executor == "simulated":
        return None
    on_cuda = parts.facts.device.startswith("cuda")
    return TorchProfiler(records_cuda=on_cuda, away=parts.away)


def _make_grammars(config: EngineConfig, parts: Parts) -> Grammars | None:
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


def _make_reception(config: EngineConfig, parts: Parts, masks: MaskMaker) -> Reception:
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

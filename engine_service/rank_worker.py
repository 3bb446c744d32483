"""What one rank runs: its device, its place among the others, and its worker.

It does not know processes, nor what becomes of decisions.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Protocol

import torch

from engine_service import decoding
from engine_service.config import EngineConfig
from engine_service.core.facts import EngineFacts
from engine_service.core.pages import PageManager
from engine_service.core.strategy import DecodeStrategy
from engine_service.core.transfers import Transfers
from engine_service.distributed import Store
from engine_service.models.base import ModelTraits
from engine_service.place import Place
from engine_service.worker.checkpoint import Report
from engine_service.worker.page_store import PageStore, WholePages
from engine_service.worker.worker import Worker

MEETING = "ranks"
"""The worker's stage in which it waits for the other ranks."""


class HasPages(Protocol):
    """Whoever holds a whole model's KV."""

    @property
    def pages(self) -> WholePages: ...


def open_worker(
    config: EngineConfig,
    report: Report,
    *,
    place: Place,
    store: Store | None = None,
    meet_now: Callable[[], object] = lambda: None,
) -> Worker:
    """Loads the worker of one rank (ranks.group.OpenWorker); `store` is rank 0's own.

    `meet_now` is called when all that does not need the other ranks has gone well, and returns when
    they have come as far.
    """
    torch.set_num_threads(_num_threads(place.num_here))

    def told(stage: str, done: int, total: int) -> None:
        report(stage, done, total)
        if stage == MEETING:
            meet_now()

    return Worker(config, make_strategies, told, place, store)


def make_transfers(
    worker: Worker, whole: HasPages, pages: PageManager, facts: EngineFacts
) -> Transfers:
    """What moves pages from and to other engines; `whole` is the worker, or the group of it and
    those that hold the rest of the model."""
    return Transfers(
        pages,
        PageStore(whole.pages),
        worker.strategies,
        facts.default_method,
        facts.vocab_size,
    )


def make_strategies(traits: ModelTraits) -> list[DecodeStrategy]:
    """The decoding methods that a model can run."""
    kinds: dict[str, Any] = decoding.strategies()
    return [
        kinds[name].for_model(
            mask_block=traits.mask_block,
            mask_token_id=traits.mask_token_id,
            logits_shift=traits.logits_shift,
            eos_token_ids=traits.eos_token_ids,
            eot_token_ids=traits.eot_token_ids,
        )
        for name in traits.methods
    ]


def _num_threads(num_ranks: int) -> int:
    """OMP_NUM_THREADS when it is set, else this rank's share of the cores it may use."""
    share = max(1, len(os.sched_getaffinity(0)) // num_ranks)
    # A list of numbers is one for every depth of nesting.
    return int(os.environ.get("OMP_NUM_THREADS", "").split(",")[0] or share)

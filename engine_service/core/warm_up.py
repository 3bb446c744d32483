"""A first request before the first request: what is made on first use is made before READY.

It does not know models; the scheduler and the executor are the real ones.
"""

from __future__ import annotations

import logging
import struct

from engine_service.core.facts import EngineFacts
from engine_service.core.messages import Submit
from engine_service.core.params import DecodingChoice, PoolChoice, SamplingParams
from engine_service.core.scheduler import Scheduler
from engine_service.core.step import FULL
from engine_service.core.strategy import Executor
from tidemill.runtime.errors import ServiceError

_KEY = 0
"""The server counts from 1."""
_TOKEN_ID = 0
_SALT = "warm-up"
"""What it leaves in the prefix cache is found by nobody."""
_FEW_TOKENS = 2
_LOG = logging.getLogger("tidemill.rank")


def warm_up(scheduler: Scheduler, executor: Executor, facts: EngineFacts) -> int:
    """Runs one short request to its end and returns the number of its steps; raises what a step
    raises, so that an engine whose steps fail does not become ready. What the configuration would
    refuse of clients too is no reason not to start: they are told."""
    try:
        scheduler.submit(_request(facts))
    except ServiceError as refused:
        _LOG.warning("nothing was warmed up, requests may be refused: %s", refused.message)
        return 0
    num_steps = 0
    while scheduler.has_work:
        plan = scheduler.schedule()
        if plan is not None:
            scheduler.apply(plan, executor.collect(executor.launch(plan)))
            num_steps += 1
        scheduler.emit()
    scheduler.planner.counting.reset()
    scheduler.gate.forget()
    return num_steps


def _request(facts: EngineFacts) -> Submit:
    """A block of output, or a few tokens; for encoders one token to read."""
    block = 1 if facts.block_length >= FULL else facts.block_length
    tokens = min(max(_FEW_TOKENS, block), facts.max_model_len - 1)
    pool = None
    if not facts.methods:
        assert facts.pooling is not None, "a model that neither generates nor pools"
        pool = PoolChoice()
    return Submit(
        key=_KEY,
        request_id=_SALT,
        prompt=struct.pack("<I", _TOKEN_ID),
        sampling=SamplingParams(max_tokens=tokens, ignore_eos=True),
        decoding=DecodingChoice(),
        cache_salt=_SALT,
        pool=pool,
    )

"""What is refused of a config by itself, whatever the model and the machine.

It does not know torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from engine_service.config import EngineConfig
from tidemill.ranges import (
    COUNT,
    MESSAGE_BYTES,
    PORT,
    SOME_TIME,
    TIME,
    Range,
    check_ranges,
)
from tidemill.runtime.errors import FailedPrecondition, InvalidRequest, Unsupported
from tidemill.security.tls_flags import check_server_flags
from tidemill.telemetry.tracer import checked_ratio

MAX_TRACE_LEVEL = 3
MOST_RANKS = 64
"""Of a group: plans are told to so many."""
_TRANSFER_FLAGS = ("kv_connector", "kv_transfer_timeout_s", "kv_tls_ca", "kv_tls_name")
"""Read by engines that move KV. Prefill and decode engines may be given the same ones."""
_MOST_SLOTS = ((1 << 31) - 1, "what 32 bits count")
"""Of any table; far below it there is no memory for one."""
_DEFAULTS = EngineConfig()
_RANGES: Mapping[str, Range] = MappingProxyType(
    {
        "tensor_parallel_size": Range(1, "one process"),
        "pipeline_parallel_size": Range(1, "one stage"),
        "kv_transfer_timeout_s": TIME,
        "max_model_len": Range(2, "one prompt token and one output token"),
        "page_size": Range(1, "one token", *_MOST_SLOTS),
        "num_pages": Range(1, "one page", *_MOST_SLOTS),
        "memory_fraction": Range(0, "nothing of it", 1, "all of it"),
        "cpu_kv_bytes": COUNT,
        "max_rows": Range(1, "one request", *_MOST_SLOTS),
        "token_budget": Range(1, "one token"),
        "logit_budget": Range(1, "one token"),
        "canvas_budget": Range(1, "the last canvas of a step may overdraw it"),
        "max_queued_requests": COUNT,
        "max_queued_tokens": COUNT,
        "max_queue_delay_s": TIME,
        "age_bound_s": TIME,
        "max_logprobs": COUNT,
        "simulated_step_ms": TIME,
        "engine_port": PORT,
        "admin_port": PORT,
        "health_port": PORT,
        "metrics_port": PORT,
        "max_message_bytes": MESSAGE_BYTES,
        "drain_timeout_s": TIME,
        "drain_pause_s": TIME,
        "heartbeat_timeout_s": SOME_TIME,
        "hang_timeout_s": TIME,
        "trace_level": Range(0, "no spans", MAX_TRACE_LEVEL, "all spans"),
        "trace_step_every": COUNT,
    }
)


def check(config: EngineConfig) -> None:
    """Raises InvalidRequest or Unsupported naming the flag, the value, the limit and what to pass
    instead; FailedPrecondition for flags of TLS that do not go together."""
    check_ranges(config, _RANGES)
    checked_ratio(config.trace_sample_ratio)
    check_count(config.tensor_parallel_size, config.num_ranks)
    check_server_flags(config)
    if config.executor == "simulated":
        _check_simulated(config)
    if config.expert_parallel and config.tensor_parallel_size == 1:
        raise experts_refused("tensor_parallel_size is 1")
    _check_role(config)


def check_count(tensor_parallel_size: int, num_all: int) -> None:
    """Raises InvalidRequest for no ranks, and for more in all than a group has, naming the flag to
    change."""
    if tensor_parallel_size >= 1 and num_all <= MOST_RANKS:
        return
    limit = f"a group has 1 to {MOST_RANKS} ranks"
    if 1 <= tensor_parallel_size <= MOST_RANKS:  # the stages make them too many
        raise InvalidRequest(
            f"tensor_parallel_size is {tensor_parallel_size}, {num_all} in all; {limit}: pass "
            f"--pipeline-parallel-size {MOST_RANKS // tensor_parallel_size} or less",
            param="pipeline_parallel_size",
        )
    raise InvalidRequest(
        f"tensor_parallel_size is {tensor_parallel_size}; {limit}", param="tensor_parallel_size"
    )


def experts_refused(why: str) -> InvalidRequest:
    """The error of experts that cannot be dealt out, and why."""
    return InvalidRequest(
        f"expert_parallel gives ranks some of a layer's experts each, and {why}: leave it out",
        param="expert_parallel",
    )


def role_refused(config: EngineConfig, why: str) -> Unsupported:
    """The error of a role that cannot be had, and why."""
    return Unsupported(f"role is {config.role!r}: {why}; pass --role both", param="role")


def _check_simulated(config: EngineConfig) -> None:
    """Raises Unsupported for what only a model has."""
    if config.expert_parallel:
        raise Unsupported("the simulated executor has no experts", param="expert_parallel")
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        if (size := getattr(config, name)) != 1:
            text = f"the simulated executor is one rank; {name} is {size}, pass 1"
            raise Unsupported(text, param=name)


def _check_role(config: EngineConfig) -> None:
    """Raises Unsupported where a prompt's KV cannot be moved, InvalidRequest for flags that an
    engine does not read that moves none, FailedPrecondition for a name without its CA."""
    if config.role == "both":
        for name in _TRANSFER_FLAGS:
            if (given := getattr(config, name)) != getattr(_DEFAULTS, name):
                raise InvalidRequest(
                    f"{name} is {given!r}, which only engines that move KV read; leave it out, or "
                    "pass --role prefill or --role decode",
                    param=name,
                )
        return
    if config.executor == "simulated":
        raise role_refused(config, "the simulated executor keeps no keys and values")
    if not config.prefix_caching:
        raise role_refused(config, "it hands prefixes over, and prefix_caching is off")
    if config.kv_tls_name is not None and config.kv_tls_ca is None:
        raise FailedPrecondition(
            f"--kv-tls-name {config.kv_tls_name} is the name in prefill engines' certificates, and "
            "without --kv-tls-ca they are spoken to in plaintext; give --kv-tls-ca, the CA of "
            "these certificates, or leave the name out",
            reason="TLS_FILES",
            param="kv_tls_name",
        )

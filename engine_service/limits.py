"""What is refused of a config by itself, whatever the model and the machine.

It does not know torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from engine_service.config import EngineConfig
from tidemill.runtime.errors import InvalidRequest, Unsupported
from tidemill.telemetry.tracer import checked_ratio

MAX_TRACE_LEVEL = 3
_LAST_PORT = (1 << 16) - 1
_TRANSFER_FLAGS = ("kv_connector", "kv_transfer_timeout_s", "kv_tls_ca", "kv_tls_name")
"""Read by engines that move KV. Prefill and decode engines may be given the same ones."""
_DEFAULTS = EngineConfig()


class _Range(NamedTuple):
    least: float
    why: str
    most: float = math.inf
    why_most: str = ""


_TIME = _Range(0, "a time")
_COUNT = _Range(0, "a count")
_PORT = _Range(0, "a free port", _LAST_PORT, "the last port")
_RANGES: Mapping[str, _Range] = MappingProxyType(
    {
        "tensor_parallel_size": _Range(1, "one process"),
        "pipeline_parallel_size": _Range(1, "one stage"),
        "kv_transfer_timeout_s": _TIME,
        "max_model_len": _Range(2, "one prompt token and one output token"),
        "page_size": _Range(1, "one token"),
        "num_pages": _Range(1, "one page"),
        "memory_fraction": _Range(0, "nothing of it", 1, "all of it"),
        "cpu_kv_bytes": _COUNT,
        "max_rows": _Range(1, "one request"),
        "token_budget": _Range(1, "one token"),
        "logit_budget": _Range(1, "one token"),
        "canvas_budget": _Range(1, "the last canvas of a step may overdraw it"),
        "max_queued_requests": _COUNT,
        "max_queued_tokens": _COUNT,
        "max_queue_delay_s": _TIME,
        "age_bound_s": _TIME,
        "max_logprobs": _COUNT,
        "simulated_step_ms": _TIME,
        "engine_port": _PORT,
        "admin_port": _PORT,
        "health_port": _PORT,
        "metrics_port": _PORT,
        "max_message_bytes": _Range(1, "one byte"),
        "drain_timeout_s": _TIME,
        "drain_pause_s": _TIME,
        "heartbeat_timeout_s": _TIME,
        "hang_timeout_s": _TIME,
        "trace_level": _Range(0, "no spans", MAX_TRACE_LEVEL, "all spans"),
        "trace_step_every": _COUNT,
    }
)


def check(config: EngineConfig) -> None:
    """Raises InvalidRequest or Unsupported naming the flag, the value, the limit and what to pass
    instead. A value of None is chosen later."""
    for name, allowed in _RANGES.items():
        value = getattr(config, name)
        if value is not None:
            require_at_least(name, value, allowed.least, allowed.why)
            if value > allowed.most:
                raise InvalidRequest(
                    f"{name} {value} is more than {allowed.most:g} ({allowed.why_most}); pass "
                    f"{allowed.most:g} or less",
                    param=name,
                )
    checked_ratio(config.trace_sample_ratio)
    _check_role(config)


def require_at_least(name: str, value: float, least: float, because: str) -> None:
    """Raises InvalidRequest for less, and for what is no number."""
    if not value >= least:
        raise InvalidRequest(
            f"{name} {value} is less than {least:g} ({because}); pass {least:g} or more", param=name
        )


def role_refused(config: EngineConfig, why: str) -> Unsupported:
    """The error of a role that cannot be had, and why."""
    return Unsupported(f"role is {config.role!r}: {why}; pass --role both", param="role")


def _check_role(config: EngineConfig) -> None:
    """Raises Unsupported where a prompt's KV cannot be moved, InvalidRequest for flags that an
    engine does not read that moves none."""
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

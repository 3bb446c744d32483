"""What must be alike on all hosts of a group, told and compared before anything is loaded.

It does not know how it travels.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from importlib import metadata
from typing import Any

from engine_service.config import EngineConfig
from tidemill import __version__

_OF_ONE_NODE = frozenset({
    "node_rank", "host", "engine_port", "vllm_facade", "admin_port", "kv_events_zmq",
    "kv_events_replay", "kv_events_topic", "tls_cert", "tls_key", "tls_client_ca",
    "health_port", "reflection", "max_message_bytes", "drain_timeout_s", "drain_pause_s",
    "heartbeat_timeout_s", "hang_timeout_s", "metrics_port", "metrics_alias", "otlp_endpoint",
    "trace_sample_ratio", "trace_level", "trace_step_every", "log_level", "tokenizer",
    "max_queued_requests", "max_queued_tokens", "max_queue_delay_s", "age_bound_s",
    "max_logprobs", "default_method", "default_params", "generation_config", "prefix_caching",
    "group_token_file", "simulated_step_ms", "kv_connector", "kv_transfer_timeout_s", "kv_tls_ca",
    "kv_tls_name",
})  # fmt: skip
"""What only the process that serves reads: other nodes need not be told."""


_COMPUTING = ("torch", "triton")


def versions() -> dict[str, str]:
    """Of what computes, without loading it. Each rank chooses its tokens by kernels that Triton has
    compiled there: another compiler's may round otherwise, and the ranks' texts part."""
    return {"tidemill": __version__, **{name: _version(name) for name in _COMPUTING}}


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "none"


def likeness(config: EngineConfig | None) -> dict[str, Any]:
    """Plain values for JSON. `config` None: this host takes rank 0's."""
    if config is None:
        return {"versions": versions()}
    shared = {name: value for name, value in asdict(config).items() if name not in _OF_ONE_NODE}
    words = json.dumps(shared, sort_keys=True).encode()
    digest = hashlib.sha256(words).hexdigest()[:16]
    return {"versions": versions(), "config": shared, "digest": digest}


def difference(own: dict[str, Any], theirs: dict[str, Any], whose: str) -> str | None:
    """What is not alike, with both values; None when all is. `own` is rank 0's."""
    pairs = dict(_pairs(own["versions"], theirs["versions"]))
    if "config" in theirs and own["digest"] != theirs["digest"]:
        pairs |= _pairs(own["config"], theirs["config"])
    if not pairs:
        return None
    told = "; ".join(f"{name} is {a} on rank 0 and {b} {whose}" for name, (a, b) in pairs.items())
    return f"{told}: all hosts of a group need the same versions and flags"


def _pairs(own: dict[str, Any], theirs: dict[str, Any]) -> dict[str, tuple[str, str]]:
    names = sorted(own.keys() | theirs.keys())
    both = {name: (repr(own.get(name)), repr(theirs.get(name))) for name in names}
    return {name: pair for name, pair in both.items() if pair[0] != pair[1]}

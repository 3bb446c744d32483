"""Keywords of `tidemill.LLM`, which are the fields of EngineConfig."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Mapping
from dataclasses import fields
from os import PathLike
from typing import Any, Literal, get_args, get_origin, get_type_hints

from engine_service.config import EngineConfig
from tidemill.kinds import settled
from tidemill.runtime.errors import InvalidRequest, Unsupported

OF_SERVICES = frozenset({
    "role", "kv_connector", "kv_transfer_timeout_s", "kv_tls_ca", "kv_tls_name", "host",
    "engine_port", "vllm_facade", "admin_port", "kv_events_zmq", "kv_events_replay",
    "kv_events_topic", "tls_cert", "tls_key", "tls_client_ca", "health_port", "reflection",
    "max_message_bytes", "drain_timeout_s", "drain_pause_s", "heartbeat_timeout_s",
    "hang_timeout_s", "metrics_port", "metrics_alias", "otlp_endpoint", "trace_sample_ratio",
    "trace_level", "trace_step_every",
})  # fmt: skip
"""Fields of EngineConfig that nobody reads where an engine serves nobody."""
_DEFAULTS = EngineConfig()


def engine_config(
    model: str, keywords: Mapping[str, Any], skip_tokenizer_init: object = False
) -> EngineConfig:
    """What they ask for; raises TypeError for a keyword that is none of its fields or has a value
    of another kind, InvalidRequest for an unknown word, Unsupported for more engines than one and
    for what only a service has."""
    num_engines = keywords.get("data_parallel_size", 1)
    if num_engines != 1:
        raise Unsupported(
            f"data_parallel_size is {num_engines}, and an LLM is one engine in this process; run"
            f" `tidemill serve {model} --data-parallel-size {num_engines}` and ask it with"
            " tidemill.client.Client, or run one program per GPU with device='cuda:N'",
            param="data_parallel_size",
        )
    keywords = {name: value for name, value in keywords.items() if name != "data_parallel_size"}
    known = {field.name for field in fields(EngineConfig)}
    _checked("skip_tokenizer_init", bool, skip_tokenizer_init)  # beside them, and no field
    for name in keywords:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise TypeError(f"LLM() got an unknown keyword {name!r}{hint}")
        if name in OF_SERVICES and keywords[name] != getattr(_DEFAULTS, name):
            raise Unsupported(
                f"{name} is of the engine service, and an LLM is an engine in this process; leave "
                f"it out, or run `tidemill serve {model}` and ask it with tidemill.client.Client",
                param=name,
            )
    # Bounds of the queue protect a service from its callers; here the caller holds the queue.
    unbounded = {
        "max_queued_requests": sys.maxsize,
        "max_queued_tokens": sys.maxsize,
        "max_queue_delay_s": 0.0,
    }
    hints = get_type_hints(EngineConfig)
    checked = {name: _checked(name, hints[name], value) for name, value in keywords.items()}
    return EngineConfig(model=_checked("model", str, model), **{**unbounded, **checked})


def _checked(name: str, hint: Any, value: Any) -> Any:
    """The value, if it is one that a flag could have had. A text may be anything that reads as one,
    such as a Path."""
    kinds = get_args(hint) or (hint,)
    if get_origin(hint) is Literal:
        if not any(value == one for one in kinds):
            raise InvalidRequest(
                f"{name} is {value!r}; it must be one of {', '.join(kinds)}", param=name
            )
        return value
    if name == "hf_overrides":  # which has words of its own
        return value
    is_path = get_origin(hint) is not dict and str in kinds and isinstance(value, PathLike)
    return value if is_path else settled("LLM()", name, hint, value)

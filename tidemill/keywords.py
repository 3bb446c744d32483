"""Keywords of `tidemill.LLM`, which are the fields of EngineConfig."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from engine_service.config import EngineConfig
from tidemill.runtime.errors import Unsupported


def engine_config(model: str, keywords: Mapping[str, Any]) -> EngineConfig:
    """What they ask for; raises TypeError for a keyword that is none of its fields, and
    Unsupported for more engines than one."""
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
    for name in keywords:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise TypeError(f"LLM() got an unknown keyword {name!r}{hint}")
    # Bounds of the queue protect a service from its callers; here the caller holds the queue.
    unbounded = {
        "max_queued_requests": sys.maxsize,
        "max_queued_tokens": sys.maxsize,
        "max_queue_delay_s": 0.0,
    }
    return EngineConfig(model=model, **{**unbounded, **keywords})

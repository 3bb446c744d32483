"""Keywords of `tidemill.LLM`, which are the fields of EngineConfig."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from engine_service.config import EngineConfig


def engine_config(model: str, keywords: Mapping[str, Any]) -> EngineConfig:
    """What they ask for; raises TypeError for a keyword that is none of its fields."""
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

"""What an operator says over a model's config.json (`hf_overrides`), as vLLM's flag of that name.

It does not know any of the keys.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from tidemill.runtime.errors import InvalidRequest

_EXAMPLE = '{"block_size": 4}'
_MOST_SHOWN = 80
_SIGN = "+"
"""What follows it in a weight version is of the overrides: frontends compare it, of engines whose
weights have different times on different hosts."""


def check_overrides(overrides: object) -> None:
    """Raises InvalidRequest for anything but what a JSON object says, as keywords may be."""
    try:
        if isinstance(overrides, dict) and json.loads(json.dumps(overrides)) == overrides:
            return
        why = f"is of type {type(overrides).__name__}"
        if isinstance(overrides, dict):
            why = "would be another one in JSON"
    except (TypeError, ValueError, RecursionError) as error:
        why = f"cannot be written as JSON ({error})"
    shown = repr(overrides)
    shown = shown if len(shown) <= _MOST_SHOWN else f"{shown[:_MOST_SHOWN]}..."
    raise InvalidRequest(
        f"hf_overrides {shown} {why}; pass a JSON object of what to say over config.json, such as "
        f"--hf-overrides '{_EXAMPLE}'",
        param="hf_overrides",
    )


def overridden(hf_config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The config with the overrides over it: objects key by key, everything else as a whole."""
    found = dict(hf_config)
    for key, value in overrides.items():
        own = found.get(key)
        if isinstance(own, Mapping) and isinstance(value, Mapping):
            value = overridden(own, value)
        found[key] = value
    return found


def version_under(weight_version: str, overrides: Mapping[str, Any]) -> str:
    """Of weights that a config with these overrides reads: the same numbers mean another model, so
    its KV must not be taken for that of the model without them."""
    if not overrides:
        return weight_version
    words = json.dumps(overrides, sort_keys=True).encode()
    return f"{weight_version}{_SIGN}{hashlib.sha256(words).hexdigest()[:16]}"

"""Reads values of config.json that are no sizes: lists with an entry a layer, and factors.

It does not know any single architecture.
"""

from __future__ import annotations

import reprlib
import sys
from typing import Any

from engine_service.models.base import HFConfig
from tidemill.runtime.errors import InvalidRequest


def listed(hf_config: HFConfig, key: str) -> list[Any]:
    """Left out, null and empty are the same; raises InvalidRequest naming what is no list."""
    value = hf_config.get(key) or []
    if not isinstance(value, list | tuple):
        raise InvalidRequest(f"config.json: {key} must be a list, found {value!r}", param=key)
    return list(value)


def layers_listed(hf_config: HFConfig, key: str) -> set[int]:
    """The same of numbers of layers: another spelling of one would be no layer's."""
    found = listed(hf_config, key)
    for one in found:
        if not isinstance(one, int) or isinstance(one, bool):
            raise InvalidRequest(
                f"config.json: {key} must be a list of layers' numbers, found {found!r}", param=key
            )
    return set(found)


def factor(hf_config: HFConfig, key: str) -> float:
    """What hidden states are multiplied with; raises InvalidRequest for what leaves nothing of
    them, naming it."""
    value = hf_config.get(key)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is None or not is_number or not 0 < value <= sys.float_info.max:
        raise InvalidRequest(
            f"config.json: {key} must be a number above 0, found {reprlib.repr(value)}", param=key
        )
    return float(value)

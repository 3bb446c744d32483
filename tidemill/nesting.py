"""How deeply JSON may be nested. Programs that write it again end at a few hundred levels."""

from __future__ import annotations

import json
from typing import Any

from tidemill.runtime.errors import InvalidRequest

MAX_DEPTH = 128
"""Objects and lists inside of each other."""


def is_too_deep(value: dict[str, Any] | list[Any], most: int = MAX_DEPTH) -> bool:
    """Whether there are more than `most` levels of objects and lists."""
    level = [value]
    for _ in range(most):
        inner = [one.values() if isinstance(one, dict) else one for one in level]
        level = [one for some in inner for one in some if isinstance(one, dict | list)]
        if not level:
            return False
    return True


def check_nesting(text: str, param: str) -> None:
    """Raises InvalidRequest naming `param` for JSON that is nested too deeply. What is no JSON is
    somebody else's to refuse."""
    if text.count("[") + text.count("{") <= MAX_DEPTH:
        return
    try:
        value = json.loads(text)
    except RecursionError:
        is_deep = True
    except ValueError:
        return
    else:
        is_deep = isinstance(value, dict | list) and is_too_deep(value)
    if is_deep:
        raise InvalidRequest(
            f"{param} has more than {MAX_DEPTH} objects and lists inside of each other; nest it "
            "less deeply",
            param=param,
        )

"""Values of a dataclass compared with the kinds that its annotations name, when it is made.

Python takes anything for anything, and a text in the place of a number fails far from whoever wrote
it, or never. It does not know which values are allowed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import fields
from functools import lru_cache
from numbers import Integral, Real
from types import MappingProxyType, NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

_NAMES: Mapping[Any, tuple[str, str]] = MappingProxyType(
    {
        bool: ("True or False", ""),
        int: ("an integer", "integers"),
        float: ("a number", "numbers"),
        str: ("a text", "texts"),
        NoneType: ("None", ""),
    }
)
"""One of a kind, and several."""
_MOST_SHOWN = 60


def settle_kinds(made: object) -> None:
    """Checks all fields of a new dataclass, and makes scalars of other libraries plain ones.

    Raises TypeError naming the field, its value and what it should have been. An integer is a
    number; True and False are neither. None is an empty list or mapping, as other libraries say it.
    """
    kind = type(made)
    for name, hint in hints_of(kind):  # type: ignore[arg-type]  # classes are hashable
        value = getattr(made, name)
        plain = settled(kind.__name__, name, hint, value)
        if plain is not value:
            object.__setattr__(made, name, plain)


def settled(owner: str, name: str, hint: Any, value: Any) -> Any:
    """One value as its field has it. Raises TypeError as `settle_kinds` does."""
    try:
        is_empty = value is None and get_origin(hint) in (list, dict)
        return get_origin(hint)() if is_empty else _settled(hint, value)
    except (TypeError, OverflowError):  # the latter: an integer that no float can hold
        shown = repr(value)
        shown = shown if len(shown) <= _MOST_SHOWN else shown[:_MOST_SHOWN] + "..."
        raise TypeError(
            f"{owner}: {name} is {shown}, of type {type(value).__name__}; pass {_wording(hint)}"
        ) from None


@lru_cache
def hints_of(kind: type[Any]) -> tuple[tuple[str, Any], ...]:
    """Names and annotations of a dataclass's fields."""
    hints = get_type_hints(kind)
    return tuple((one.name, hints[one.name]) for one in fields(kind))


def _settled(hint: Any, value: Any) -> Any:
    """The value as a plain one, lists and mappings as new ones; raises TypeError for one of another
    kind."""
    if hint is Any or type(value) is hint:
        return value
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return _first_of(inner, value)
    if origin is list and isinstance(value, Sequence | Set) and not isinstance(value, str | bytes):
        return [_settled(inner[0], one) for one in value]
    if origin is dict and isinstance(value, Mapping):
        return {_settled(inner[0], key): _settled(inner[1], one) for key, one in value.items()}
    if hint is bool and _is_numpy_bool(value):
        return bool(value)
    if hint in (int, float):
        if isinstance(value, Integral if hint is int else Real) and not isinstance(value, bool):
            return hint(value)
    elif isinstance(hint, type) and isinstance(value, hint):
        return value
    raise TypeError


def _first_of(hints: Sequence[Any], value: Any) -> Any:
    """By the first that takes it."""
    for hint in hints:
        try:
            return _settled(hint, value)
        except TypeError:
            continue
    raise TypeError


def _is_numpy_bool(value: Any) -> bool:
    kind = type(value)
    return kind.__module__ == "numpy" and kind.__name__ in ("bool", "bool_")


def _wording(hint: Any) -> str:
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return " or ".join(map(_wording, inner))
    if origin is list:
        return f"a list of {_NAMES[inner[0]][1]}"
    if origin is dict:
        kept = "" if inner[1] is Any else f" to {_NAMES[inner[1]][1]}"
        return f"a mapping of {_NAMES[inner[0]][1]}{kept}"
    return _NAMES[hint][0] if hint in _NAMES else f"a {hint.__name__}"

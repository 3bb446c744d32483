"""What callers of the clients give: what is of another kind than it should be, or cannot travel, is
refused by its name before it fails far from whoever wrote it.

It does not know messages or calls.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping
from typing import Any

from tidemill.kinds import hints_of, settled
from tidemill.runtime.errors import InvalidRequest


def settle_options(made: Any, *, beside: tuple[str, ...]) -> None:
    """Checks the fields of a new dataclass but those `beside`; None stands for a field's default.

    Raises InvalidRequest naming the field.
    """
    for name, hint in hints_of(type(made)):  # type: ignore[arg-type]  # classes are hashable
        if name in beside:
            continue
        value = getattr(made, name)
        if value is None:
            value = type(made).__dataclass_fields__[name].default
        object.__setattr__(made, name, of_kind(type(made).__name__, name, hint, value))


def of_kind(owner: str, name: str, hint: Any, value: Any) -> Any:
    """The value as a plain one of that kind. Raises InvalidRequest."""
    try:
        return settled(owner, name, hint, value)
    except TypeError as failure:
        raise InvalidRequest(str(failure), param=name) from None


def several(name: str, value: Any, wording: str) -> Any:
    """The value, if it holds several; texts, bytes and mappings do, but never those that are meant.
    Raises InvalidRequest."""
    if isinstance(value, Iterable) and not isinstance(value, str | bytes | bytearray | Mapping):
        return value
    raise wrong_kind(name, value, wording)


def ids_of(name: str, value: Any, wording: str) -> list[Any]:
    """The token ids that it holds. Raises InvalidRequest for what holds none, and for True and
    False, which Python and messages take for 1 and 0: a mask, given in the place of ids."""
    listed = list(several(name, value, wording))
    if bool in map(type, listed):
        place = next(at for at, one in enumerate(listed) if isinstance(one, bool))
        raise wrong_kind(f"{name}[{place}]", listed[place], "token ids, which are integers")
    return listed


def wrong_kind(name: str, value: Any, wording: str) -> InvalidRequest:
    """The error for a value of another kind."""
    return InvalidRequest(f"{name} is {described(value)}; pass {wording}", param=name)


def described(value: Any) -> str:
    """What it is, however long, and of which type."""
    return f"{reprlib.repr(value)}, of type {type(value).__name__}"


def printable(field: str, value: str) -> str:
    """The value, if metadata can hold it. The error does not show it: it may be a key."""
    if not isinstance(value, str):
        raise InvalidRequest(f"{field} is of type {type(value).__name__}; pass a text", param=field)
    wrong = [at for at, letter in enumerate(value) if not " " <= letter <= "~"]
    if not wrong:
        return value
    raise InvalidRequest(
        f"{field}: character {wrong[0] + 1} of {len(value)} is not printable ASCII, which metadata "
        "must be; leave it out (a line's end, from the file that it was read from?)",
        param=field,
    )

"""Calls of one object from several threads, one after the other. It does not know what they do."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class TakesTurns(Protocol):
    """Has one `threading.RLock`: a call may make others of the same object."""

    @property
    def _turn(self) -> AbstractContextManager[bool]: ...


Self = TypeVar("Self", bound=TakesTurns)


def in_turn(method: Callable[Concatenate[Self, P], R]) -> Callable[Concatenate[Self, P], R]:
    """`method`, which waits until no other thread is in a call of the same object."""

    @wraps(method)
    def call(self: Self, /, *args: P.args, **named: P.kwargs) -> R:
        with self._turn:
            return method(self, *args, **named)

    return call

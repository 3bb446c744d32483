"""Calls a function on a thread whose stack has room for deep recursion.

A library that goes beyond the end of its stack ends the process, and no exception says so. It does
not know what is called.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_STACK_BYTES = 1 << 29
"""Of addresses; what is touched of them is memory until the call ends."""
_starting = threading.Lock()


def on_deep_stack(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What `function` returns, or raises."""
    told: Future[T] = Future()

    def work() -> None:
        try:
            told.set_result(function(*args, **kwargs))
        except BaseException as failure:  # what a library panics with is no Exception
            told.set_exception(failure)

    thread = threading.Thread(target=work, name="deep stack")
    with _starting:  # the size is that of whatever thread is started next
        before = threading.stack_size(_STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    return told.result()

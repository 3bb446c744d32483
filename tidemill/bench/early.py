"""A run of several measurements that ends early: those that it has are kept."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from contextlib import contextmanager
from typing import Any


class EndedEarly(Exception):
    """The figures by then; what ended the run is the cause."""

    def __init__(self, figures: dict[str, Any]) -> None:
        super().__init__("the run ended before its last measurement")
        self.figures = figures


@contextmanager
def kept_if_ended(figures: dict[str, Any], measured: Sized) -> Iterator[None]:
    """What runs here adds to `measured`, a part of the figures. Whatever ends it, Ctrl-C too, comes
    out as EndedEarly unless there is nothing yet."""
    try:
        yield
    except BaseException as cause:
        if not measured:
            raise
        reason = str(cause) or type(cause).__name__
        raise EndedEarly(figures | {"ended_early": reason}) from cause

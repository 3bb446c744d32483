"""What rank 0 and a follower tell each other beside the plans. Picklable plain values."""

from __future__ import annotations

from typing import Any, NamedTuple

from engine_service.config import EngineConfig
from engine_service.place import Place
from tidemill.runtime.errors import ServiceError

WEIGHTS = "weights"
"""The stage of loading that is counted over all ranks."""


class Start(NamedTuple):
    """The first message to a follower: what to load, and as which rank."""

    config: EngineConfig
    place: Place
    ends_silent_leader: bool
    """Whether the follower kills a rank 0 that shows no life: not where it is a user's program,
    which may stand in a debugger."""


class Stage(NamedTuple):
    """A follower is in a stage of loading, and has done so much of it."""

    name: str
    done: int = 0
    total: int = 0


class Here(NamedTuple):
    """A follower has its device; the ranks may meet."""


class Ran(NamedTuple):
    """A follower is done with a timed step and says so at once; monotonic nanoseconds of its
    host."""

    seq: int
    launched_ns: int
    done_ns: int


class ReadPages(NamedTuple):
    """To the followers, among the plans: tell what you hold of these pages, unless it is a copy."""

    pages: tuple[int, ...]
    settled: int
    """Steps up to this number were collected by rank 0, as in a plan: the pages are as they left
    them."""


class PagesRead(NamedTuple):
    """The answer: the bytes of worker.page_shares.cut."""

    content: bytearray


class WritePages(NamedTuple):
    """To the followers, among the plans: take what you hold of these pages."""

    pages: tuple[int, ...]
    settled: int
    """As in ReadPages: what those steps did to the pages comes before."""


class PagesAwaited(NamedTuple):
    """The answer: it takes them now, so that they do not lie in front of signs of life."""


class PagesGiven(NamedTuple):
    """And what is then told to each: the bytes of its own share."""

    content: bytearray


class PagesTaken(NamedTuple):
    """The answer: they are there. Nothing else is told before, so that no plan gets ahead of them:
    who waits for pages takes no plans."""


class Loaded(NamedTuple):
    """A follower takes plans from here on. `sizes` must be the same on all ranks."""

    sizes: dict[str, Any]


class Failed(NamedTuple):
    """A follower ends, and why."""

    error: ServiceError
    is_verdict: bool
    """It says what to change; otherwise something failed, perhaps because another rank ended."""

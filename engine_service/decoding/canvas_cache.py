"""What a full canvas keeps between the steps of a block, and what a step computes for it.

Every key and value changes with every token revealed, so whatever is kept is an approximation
within a block; `none` keeps nothing and is exact. Plain integers; it does not know spans or rules.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from engine_service.decoding.knobs import (
    read_choice,
    read_flag,
    read_number,
    read_whole,
    wrong_knob,
)

CACHES = ("none", "prefix", "dual", "sparse")
"""What a step computes after the first ones of a block: everything; the block and what follows it
(what lies ahead is kept); the block alone (all others are kept: Fast-dLLM, Wu et al. 2025, arXiv
2505.22618); the block alone (of all others a share is kept: Sparse-dLLM, Song et al. 2025, arXiv
2508.02558, and dLLM-Serve)."""
_SPARSE = ("retention_ratio", "delay_step", "head_select", "pool_kernel")
KNOBS = ("cache", "refresh_interval", *_SPARSE)
_MOST = 1 << 20
"""Beyond every context."""


class Extent(NamedTuple):
    """What a step computes: the canvas's positions [start, stop), of which `kv_len` and the rest
    are the fields of a Span."""

    start: int
    stop: int
    kv_len: int
    kept: int = 0
    aside: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CanvasCache:
    """A cache with its knobs. Those of `sparse` mean nothing elsewhere."""

    name: str = "none"
    refresh_interval: int | None = None
    """Steps of a block after which what is kept is computed anew; None: once a block."""
    retention_ratio: float = 1.0
    """Share of the positions outside of a block that are kept, per layer and key-value head."""
    delay_step: int = 0
    """Whole steps at the beginning of a block before the one that chooses: after them the block's
    queries know better what they attend to."""
    head_select: bool = False
    """Every key-value head keeps positions of its own."""
    pool_kernel: int = 1
    """Neighbours that a score is max-pooled over; 1: none."""

    @property
    def is_exact(self) -> bool:
        """Whether nothing is kept."""
        return self.name == "none"

    def room(self, end: int, hole: int) -> int:
        """Most positions of KV that a canvas of `end` ever holds, whose steps leave a hole of at
        most `hole` positions for themselves."""
        if self.is_exact:
            return 0
        return end if self.name != "sparse" else hole + self._num_kept(end - hole)

    def extent(
        self, hole: tuple[int, int], end: int, room: int, *, step: int, is_stored: bool
    ) -> Extent:
        """What the step after `step` decisions in a block computes; `hole` is the block with the
        positions that its logits need."""
        start, stop = hole
        if self.is_exact:
            return Extent(0, end, 0, aside=1)
        since = step - self.delay_step
        refresh = self.refresh_interval
        is_due = since <= 0 or not is_stored or (refresh is not None and since % refresh == 0)
        if self.name != "sparse":
            last = stop if self.name == "dual" else end
            return Extent(0, end, end) if is_due else Extent(start, last, end)
        kept = self._num_kept(end - (stop - start))
        if is_due:
            return Extent(0, end, room, kept if since >= 0 else 0, aside=1)
        return Extent(start, stop, kept + stop - start, kept)

    def _num_kept(self, num_candidates: int) -> int:
        return min(max(1, int(num_candidates * self.retention_ratio)), num_candidates)


NO_CACHE = CanvasCache()


def without_other_caches(defaults: dict[str, Any], asked: dict[str, Any]) -> dict[str, Any]:
    """Default knobs, without those of a cache that is not the request's."""
    if asked.get("cache", defaults.get("cache")) == defaults.get("cache"):
        return defaults
    return {name: value for name, value in defaults.items() if name not in KNOBS}


def read_cache(knobs: dict[str, Any]) -> CanvasCache:
    """Checked knobs; raises InvalidRequest naming the wrong one, or one that the cache ignores."""
    name = read_choice("cache", knobs.get("cache", "none"), CACHES)
    refresh = knobs.get("refresh_interval")
    if refresh is not None:
        refresh = read_whole("refresh_interval", refresh, low=1, high=_MOST)
        if name == "none":
            raise wrong_knob("refresh_interval", refresh, "left out with cache none")
    if name != "sparse":
        for knob in _SPARSE:
            if knob in knobs:
                raise wrong_knob(knob, knobs[knob], f"left out with cache {name}: sparse reads it")
        return CanvasCache(name=name, refresh_interval=refresh)
    return CanvasCache(
        name=name,
        refresh_interval=refresh,
        retention_ratio=_read_ratio(knobs.get("retention_ratio", 0.5)),
        delay_step=read_whole("delay_step", knobs.get("delay_step", 1), low=0, high=_MOST),
        head_select=read_flag("head_select", knobs.get("head_select", False)),
        pool_kernel=_read_pool(knobs.get("pool_kernel", 3)),
    )


def _read_ratio(value: Any) -> float:
    ratio = read_number("retention_ratio", value, low=0.0, high=1.0)
    if ratio == 0:
        raise wrong_knob("retention_ratio", value, "above 0 and at most 1")
    return ratio


def _read_pool(value: Any) -> int:
    pool = read_whole("pool_kernel", value, low=1, high=255)
    if pool % 2 == 0:
        raise wrong_knob("pool_kernel", value, "odd, so that a position lies in its middle")
    return pool

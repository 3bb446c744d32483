"""What the core has done since its start, for metrics: counted per step, told once a second.

It does not know who reads it.
"""

from __future__ import annotations

from bisect import bisect_left

from engine_service.core.messages import STEP_BOUNDS, Tally
from engine_service.core.step import Memory


class Counting:
    """Plain integers that grow. Nothing is counted per token or per row."""

    __slots__ = (
        "_row_counts", "_token_counts", "canvas_positions", "committed", "denoise_steps",
        "num_preemptions", "num_rows", "num_tokens", "prefix_hits", "prefix_queries",
    )  # fmt: skip

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Back to nothing done."""
        self._token_counts = [0] * (len(STEP_BOUNDS) + 1)
        self._row_counts = [0] * (len(STEP_BOUNDS) + 1)
        self.num_tokens = 0
        self.num_rows = 0
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.num_preemptions = 0
        self.denoise_steps = 0
        self.canvas_positions = 0
        self.committed = 0

    def step(self, num_tokens: int, num_rows: int) -> None:
        """A step was planned: query tokens and rows."""
        self._token_counts[bisect_left(STEP_BOUNDS, num_tokens)] += 1
        self._row_counts[bisect_left(STEP_BOUNDS, num_rows)] += 1
        self.num_tokens += num_tokens
        self.num_rows += num_rows

    def looked_up(self, num_tokens: int, num_found: int) -> None:
        """A sequence got its first row: tokens asked of the prefix cache, and found there."""
        self.prefix_queries += num_tokens
        self.prefix_hits += num_found

    def denoised(self, num_positions: int, num_committed: int) -> None:
        """A diffusion row was decided: positions of its canvas that were, and tokens now final."""
        self.denoise_steps += 1
        self.canvas_positions += num_positions
        self.committed += num_committed

    def told(self, memory: Memory) -> Tally:
        """The numbers of now."""
        return Tally(
            token_counts=tuple(self._token_counts),
            num_tokens=self.num_tokens,
            row_counts=tuple(self._row_counts),
            num_rows=self.num_rows,
            prefix_queries=self.prefix_queries,
            prefix_hits=self.prefix_hits,
            num_preemptions=self.num_preemptions,
            denoise_steps=self.denoise_steps,
            canvas_positions=self.canvas_positions,
            committed=self.committed,
            memory=memory,
        )

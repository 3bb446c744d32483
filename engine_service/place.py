"""Where a rank stands among those that compute one model. It does not know torch, so that a process
can be told its place before it has loaded that.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Place:
    """Which rank of how many, and where they meet: (host, port) of rank 0's store."""

    rank: int = 0
    size: int = 1
    meet_at: tuple[str, int] = ("", 0)
    local_rank: int = 0
    """The rank's number on its own machine: that of its device."""
    local_size: int = 0
    """Ranks on its machine; 0: all of them."""

    @property
    def num_here(self) -> int:
        """Ranks that share this machine's cores."""
        return self.local_size or self.size


FIRST = Place()

"""What the two processes say that join rank 0 with a rank of another host."""

from __future__ import annotations

import struct
from enum import IntEnum

COUNT, CODE = struct.Struct("<Q"), struct.Struct("<i")
WINDOW = 64
"""Plans on their way that the other host has not acknowledged; further ones stay in the ring."""
ACK_EVERY = 16


class Frame(IntEnum):
    """Kinds of `link` frames, and what is in them."""

    FACTS = 1
    """JSON: who the rank is."""
    WELCOME = 2
    """JSON: rank 0's likeness, and how many ranks there are."""
    REFUSED = 3
    """Text: why it is not."""
    PIPE = 4
    """A message of the pipe between rank 0 and the follower."""
    PLAN = 5
    ACK = 6
    """COUNT: plans that the follower's ring has taken."""
    BEAT = 7
    """COUNT: the last sign of life of rank 0, or of the follower."""
    END = 8
    """Text: rank 0's last word."""
    GONE = 9
    """CODE and text: how the follower has ended."""

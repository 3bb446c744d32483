"""Some ids of a vocabulary, whose logits one rank has, and how the others' results reach it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch


class VocabShare(NamedTuple):
    """Columns of logits [N, room] are of the ids [first, first + size); those behind are empty.

    All ranks have the same room, so that all cut it into the same number of tiles.
    """

    first: int
    size: int
    join: Callable[[torch.Tensor], torch.Tensor]
    """[N, C] of every rank to [N, ranks * C], in the order of ids."""

"""What the restatements of the authors' decoding loops share: a canvas, and how tokens are chosen.

Everything is dense, slow and greedy, one request at a time; nothing of the engine is used. The
mask token's logit is -inf in every choice, as it is in the engine, and a place is open because
nothing was revealed there, never because of the token that stands there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

Logits = Callable[[torch.Tensor], torch.Tensor]
"""[1, L] int64 token ids to [1, L, V] logits, not shifted, everything computed anew."""

Past = list[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values of some positions, a pair per layer; the first dimension counts positions."""

Cached = Callable[[torch.Tensor, torch.Tensor, Past], tuple[torch.Tensor, Past]]
"""Token ids [1, Q] at positions [Q] that see each other and a past ([] is none): their logits
[1, Q, V], and their own keys and values."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a loop made of a prompt."""

    tokens: list[int]
    """The generated part."""
    reveals: list[list[int]]
    """Per forward the places it revealed, ascending, counted from the end of the prompt."""

    @property
    def nfe(self) -> int:
        """Number of forwards, those included that revealed nothing."""
        return len(self.reveals)


class Canvas:
    """A prompt followed by masks that are revealed one after the other."""

    def __init__(self, prompt: Sequence[int], length: int, mask_id: int) -> None:
        self.token_ids = torch.tensor([*prompt, *[mask_id] * length])
        self.is_open = torch.tensor([False] * len(prompt) + [True] * length)
        self._origin = len(prompt)
        self._reveals: list[list[int]] = []

    def __len__(self) -> int:
        return len(self.token_ids)

    def open_in(self, start: int, stop: int) -> list[int]:
        """The open positions of [start, stop)."""
        return [position for position in range(start, stop) if self.is_open[position]]

    def reveal(self, tokens: dict[int, int]) -> None:
        """Ends a forward: what it decided, by position; each must be open."""
        for position, token in tokens.items():
            assert self.is_open[position], f"position {position} is revealed twice"
            self.token_ids[position] = token
            self.is_open[position] = False
        self._reveals.append(sorted(position - self._origin for position in tokens))

    def outcome(self, length: int) -> Outcome:
        """The first `length` generated tokens."""
        end = self._origin + length
        return Outcome(tokens=self.token_ids[self._origin : end].tolist(), reveals=self._reveals)


def distributions(logits_NV: torch.Tensor, mask_id: int) -> torch.Tensor:
    """[N, V] probabilities without the mask token, in the number format of the logits."""
    without = logits_NV.clone()
    without[:, mask_id] = -math.inf
    return without.softmax(-1)


def most_likely(logits_NV: torch.Tensor, mask_id: int) -> tuple[list[int], list[float]]:
    """The greedy token of every row, and its probability."""
    best = distributions(logits_NV, mask_id).max(-1)
    return best.indices.tolist(), best.values.tolist()


def surest(confidences: Sequence[float], count: int) -> list[int]:
    """Indices of the `count` largest; of equal ones the first."""
    return sorted(range(len(confidences)), key=lambda index: -confidences[index])[:count]


def shares(total: int, steps: int) -> list[int]:
    """`total` divided over `steps` as evenly as whole numbers allow, the larger shares first."""
    return [total // steps + (step < total % steps) for step in range(steps)]


def shifted(logits_QV: torch.Tensor) -> torch.Tensor:
    """Row i becomes the prediction of token i, for models that predict the next one; the first
    row, which nobody predicts, keeps its own."""
    return torch.cat([logits_QV[:1], logits_QV[:-1]])


def select(past: Past, places: Iterable[int]) -> Past:
    """The past of some of its positions."""
    index = torch.tensor(list(places), dtype=torch.int64)
    return [(keys[index], values[index]) for keys, values in past]

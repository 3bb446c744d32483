"""The logits of decided positions, whole or piece by piece: whoever decides from them says which.

Of a head that ranks share each can multiply its own ids alone. It does not know models: an output
head is whatever multiplies.
Shape legend: N decided positions, E hidden size, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

import torch

from engine_service.kernels.vocab_share import VocabShare


class OutputHead(Protocol):
    """The end of a model."""

    @property
    def vocab_share(self) -> VocabShare | None:
        """Which ids this rank has; None: all."""

    def own_logits(self, hidden_NE: torch.Tensor) -> torch.Tensor:
        """[N, room] of those ids."""

    def logits(self, hidden_NE: torch.Tensor) -> torch.Tensor:
        """[N, V]."""

    def head_factors(self, hidden_NE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """(x [N, E], W [V, E]) whose product x W^T the rank's own logits are; None: they are more
        than one."""


class LastLayer(OutputHead, Protocol):
    """The end of a model, from its last layer's attention on."""

    def finish(self, hidden_NE: torch.Tensor, mixed_NC: torch.Tensor) -> None:
        """Overwrites `hidden` with the states that the head multiplies."""


class Logits(ABC):
    """Logits of N positions."""

    share: VocabShare | None = None
    """Which ids this rank can have by itself; None: there is only the whole."""
    is_known = False
    """Whether somebody has multiplied them: then leaving positions out saves nothing."""

    def own(self) -> torch.Tensor:
        """[N, room]: of the share alone."""
        return self.whole()

    @abstractmethod
    def whole(self) -> torch.Tensor:
        """[N, V]: the same tensor at every call."""

    @abstractmethod
    def factors(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """(x [N, E], W [V, E]) with own logits x W^T, for who needs no more than a piece of them
        at a time; None: there is only the whole."""

    @abstractmethod
    def at(self, places: torch.Tensor) -> Logits:
        """Those of the positions `places` [M] int64 alone."""


class KnownLogits(Logits):
    """Logits that somebody has multiplied already."""

    is_known = True

    def __init__(self, logits_NV: torch.Tensor) -> None:
        self._logits_NV = logits_NV

    def whole(self) -> torch.Tensor:
        return self._logits_NV

    def factors(self) -> None:
        return None

    def at(self, places: torch.Tensor) -> Logits:
        return KnownLogits(self._logits_NV.index_select(0, places))


class HeadLogits(Logits):
    """Logits that exist once somebody asks for them whole."""

    def __init__(self, head: OutputHead, hidden_NE: torch.Tensor) -> None:
        self._head = head
        self._hidden_NE = hidden_NE
        self._logits_NV: torch.Tensor | None = None
        self.share = head.vocab_share

    def own(self) -> torch.Tensor:
        return self._head.own_logits(self._hidden_NE)

    def whole(self) -> torch.Tensor:
        if self._logits_NV is None:
            self._logits_NV = self._head.logits(self._hidden_NE)
        return self._logits_NV

    def factors(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        return self._head.head_factors(self._hidden_NE)

    def at(self, places: torch.Tensor) -> Logits:
        return HeadLogits(self._head, self._hidden_NE.index_select(0, places))


class UnfinishedLogits(Logits):
    """Logits of positions for which the last layer ends once somebody asks: of those alone that
    are asked for."""

    def __init__(self, end: LastLayer, hidden_NE: torch.Tensor, mixed_NC: torch.Tensor) -> None:
        """`hidden` is overwritten."""
        self._end = end
        self._left = (hidden_NE, mixed_NC)
        self._finished: HeadLogits | None = None
        self.share = end.vocab_share

    def own(self) -> torch.Tensor:
        return self._finish().own()

    def whole(self) -> torch.Tensor:
        return self._finish().whole()

    def factors(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        return self._finish().factors()

    def at(self, places: torch.Tensor) -> Logits:
        if self._finished is not None:
            return self._finished.at(places)
        return UnfinishedLogits(self._end, *(x.index_select(0, places) for x in self._left))

    def _finish(self) -> HeadLogits:
        if self._finished is None:
            self._end.finish(*self._left)
            self._finished = HeadLogits(self._end, self._left[0])
        return self._finished

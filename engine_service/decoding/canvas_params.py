"""What a request of a full canvas asks for. It does not know spans, tokens or tensors."""

from __future__ import annotations

from dataclasses import dataclass

from engine_service.decoding.canvas_cache import NO_CACHE, CanvasCache
from engine_service.decoding.reveal_knobs import RevealKnobs, remembers
from engine_service.resolve import CANVAS_BLOCK

DEFAULT_BLOCK = CANVAS_BLOCK
"""Positions per block of requests that name none (Fast-dLLM's)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FullCanvasParams(RevealKnobs):
    """Knobs of one request: its rule's, where `steps` are those of the whole answer as LLaDA counts
    them (0: one position a step), and the canvas's."""

    block_length: int | None = None
    """None: DEFAULT_BLOCK, or the answer's length if that is less."""
    cache: CanvasCache = NO_CACHE
    cfg_scale: float = 0.0
    """Classifier-free guidance: how far logits move away from those without the prompt; 0: off."""

    def block_of(self, answer_len: int) -> int:
        """Positions per block of an answer."""
        return self.block_length or min(DEFAULT_BLOCK, answer_len)

    def steps_of(self, answer_len: int) -> int:
        """Decisions that a schedule takes for each block of an answer."""
        block = self.block_of(answer_len)
        return self.steps // -(-answer_len // block) or block

    def resumes(self) -> bool:
        """Whether a block can go on half way: nothing of how it went so far has to be known."""
        return self.cache.is_exact and not remembers(self)

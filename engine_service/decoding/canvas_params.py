"""What a request of a full canvas asks for. It does not know spans, tokens or tensors."""

from __future__ import annotations

from dataclasses import dataclass, fields

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

    def gap_of(self, answer_len: int) -> int:
        """Positions of an answer up to the last one that is to be decided."""
        return answer_len

    def ahead_of(self, num_given: int) -> FullCanvasParams:
        """Who asks for a gap knows its length: `steps` are those of the gap, not of what stands
        behind it, of which only the tokenizer knows how long it is."""
        own = {field.name: getattr(self, field.name) for field in fields(FullCanvasParams)}
        return _GapParams(**own, num_given=num_given)

    def block_of(self, answer_len: int) -> int:
        """Positions per block of an answer."""
        return self.block_length or min(DEFAULT_BLOCK, self.gap_of(answer_len))

    def blocks_of(self, answer_len: int) -> int:
        """Blocks of an answer that are to be decided."""
        return -(-self.gap_of(answer_len) // self.block_of(answer_len))

    def steps_of(self, answer_len: int) -> int:
        """Decisions that a schedule takes for each block of an answer."""
        return self.steps // self.blocks_of(answer_len) or self.block_of(answer_len)

    def resumes(self) -> bool:
        """Whether a block can go on half way: nothing of how it went so far has to be known."""
        return self.cache.is_exact and not remembers(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class _GapParams(FullCanvasParams):
    """Those of a request whose answer ends with tokens that came with it. No knob says so, so it is
    no field of what knobs are checked by."""

    num_given: int

    def gap_of(self, answer_len: int) -> int:
        return answer_len - self.num_given

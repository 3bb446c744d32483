"""Chunks of a streamed OpenAI answer: what chat and text completions have in common."""

from __future__ import annotations

from typing import Any

from frontend.api.openai_response import canvas_of, usage_of
from frontend.api.openai_schema import GenerationBody, StreamOptions
from frontend.api.sse import Frames
from frontend.generation import Generation
from frontend.prompt_scores import PromptScores
from frontend.text_delta import TextDelta


class ChunkWriter:
    """Puts choices into chunks, with the usage where the client asked for it."""

    def __init__(
        self,
        frames: Frames,
        generation: Generation,
        body: GenerationBody,
        scores: PromptScores,
    ) -> None:
        wanted = body.stream_options or StreamOptions()
        self._frames = frames
        self._generation = generation
        self.scores = scores
        self._is_continuous = bool(wanted.continuous_usage_stats)
        self._has_last = bool(wanted.include_usage)
        self.keeps_empty = body.return_token_ids or self._is_continuous
        """Whether a delta without text is worth a chunk of its own."""
        self._begun: set[int] = set()
        self._now: dict[str, Any] | None = None

    def news(self) -> None:
        """More has come of the choices; all chunks that tell it have the same usage. It is counted
        once: with 1,024 choices, each of whose chunks looked at all of them, a step took 0.4 s."""
        self._now = None

    def prompt_of(self, index: int) -> list[int]:
        """The token ids of the prompt of choice `index`; nothing from the second time on."""
        if index in self._begun:
            return []
        self._begun.add(index)
        return self._generation.choices[index].prompt.token_ids

    def chunk(self, choice: dict[str, Any], **changing: Any) -> bytes:
        """One choice's news. With include_usage every chunk names the usage, as null."""
        return self._frames.chunk(choices=[choice], **changing, **self._usage())

    def canvas(self, delta: TextDelta) -> bytes:
        """The tentative state of a diffusion block, in a chunk without choices. It stands behind
        the tokens of its own step, whose chunk comes next."""
        start = self._generation.choices[delta.index].num_tokens
        canvas = canvas_of(delta, self._generation.model, start)
        return self._frames.chunk(choices=[], canvas=canvas, **self._usage())

    def last(self) -> bytes:
        """The usage chunk, if it was asked for; otherwise nothing."""
        if not self._has_last:
            return b""
        return self._frames.chunk(choices=[], usage=usage_of(self._generation.usage))

    def _usage(self) -> dict[str, Any]:
        if self._is_continuous:
            if self._now is None:
                self._now = usage_of(self._generation.usage)
            return {"usage": self._now}
        return {"usage": None} if self._has_last else {}

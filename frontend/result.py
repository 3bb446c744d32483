"""A finished choice, put together from its deltas. It does not know where they come from."""

from __future__ import annotations

from dataclasses import dataclass, field

from frontend.parsers.base import ToolCall
from frontend.text_delta import TextDelta, TextLogprob


@dataclass(slots=True, eq=False)
class ChoiceResult:
    """`add` every delta of the choice; then the fields say what all of them said."""

    index: int
    calls: list[ToolCall] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TextLogprob] = field(default_factory=list)
    finish_reason: str = ""
    stop_reason: str | int | None = None
    _texts: list[str] = field(default_factory=list)
    _thoughts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """What the user reads."""
        return "".join(self._texts)

    @property
    def reasoning(self) -> str:
        """The model's reasoning, where its format keeps that apart."""
        return "".join(self._thoughts)

    def add(self, delta: TextDelta) -> None:
        """The next delta."""
        self._texts.append(delta.text)
        self._thoughts.append(delta.reasoning)
        for news in delta.calls:
            if news.name:
                self.calls.append(ToolCall(news.id, news.name))
            self.calls[news.call].arguments += news.arguments
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason

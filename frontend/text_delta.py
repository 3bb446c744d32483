"""What is new of a choice, as text: what `Choice` tells and every face writes down.

It does not know how texts are made of tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from frontend.messages import Canvas
from frontend.parsers.base import Content
from frontend.reading import CallDelta, Part


class TextLogprob(NamedTuple):
    """A token with its log-probability (None where there is none: the first of a prompt).

    `offset` counts the characters, from the prompt's start, that are complete before this token.
    """

    token_id: int
    token: str
    content: bytes
    logprob: float | None
    rank: int
    top: tuple[TextLogprob, ...] = ()
    offset: int = 0


@dataclass(slots=True, eq=False)
class TextDelta:
    """What is new of one choice. `token_ids` and `logprobs` may run ahead of the text, which holds
    back half characters, possible stop strings and possible markers of the output's format.

    `text` is what the user reads; of chats `reasoning` and `calls` are kept apart from it, and
    `parts` says in which order they came.
    """

    index: int
    text: str = ""
    reasoning: str = ""
    calls: list[CallDelta] = field(default_factory=list)
    parts: list[Part] | None = None
    """None: there is only text."""
    by_token: list[list[Part]] | None = None
    """`parts` by the entries of `logprobs`, those of the end with the last; None where either is
    missing."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TextLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    canvas: Canvas | None = None

    def in_order(self) -> list[Part]:
        """Text, reasoning and calls as they came: of several tokens, or of one that ends two
        things, there may be a call's end, and text behind it."""
        if self.parts is None:
            return [Content(self.text)] if self.text else []
        return self.parts

    def singly(self) -> Iterator[tuple[list[TextLogprob], list[Part]]]:
        """Log-probabilities and what came with them: token by token where that is known."""
        if self.by_token is None:
            yield self.logprobs, self.in_order()
        else:
            for entry, parts in zip(self.logprobs, self.by_token, strict=True):
                yield [entry], parts


def with_alternatives(entries: Iterable[TextLogprob], count: int) -> list[TextLogprob]:
    """The same with `count` alternatives a token at most: the engine is asked for prompts once,
    by whoever wants more of them."""
    return [entry._replace(top=entry.top[:count]) for entry in entries]

"""Reasoning between two tags: <think> and </think> of DeepSeek, Qwen and most others, [THINK] and
[/THINK] of Mistral."""

from __future__ import annotations

from frontend.parsers.grammar import GrammarParser, Markers, Steps
from tidemill.structured import Reasoning


class ThinkTagsParser(GrammarParser):
    """Whether the output begins inside of the reasoning depends on the prompt, because templates
    write the opening tag themselves (`begins_inside`). A model may write it again.

    Without the closing tag all of it is reasoning. What follows the closing tag is content, tags
    included: an answer may speak of them.
    """

    start, end = "<think>", "</think>"

    def __init__(self, *, is_inside: bool = False) -> None:
        self._is_inside = is_inside
        super().__init__()

    @classmethod
    def begins_inside(cls, prompt: str) -> bool | None:
        """Whether a rendered prompt leaves the reasoning open; None when it does not say."""
        tail = prompt.rstrip()
        if tail.endswith(cls.start):
            return True
        return False if tail.endswith(cls.end) else None

    @classmethod
    def leaves_open(cls, answer: str) -> bool:
        """Whether an answer, as far as it was written, begins reasoning and does not end it."""
        return answer.lstrip().startswith(cls.start) and cls.end not in answer

    @classmethod
    def in_front(cls, prompt: str, *, begins_inside: bool) -> Reasoning | None:
        """See GrammarParser."""
        is_inside = cls.begins_inside(prompt)
        if is_inside is False:
            return None
        is_open = begins_inside if is_inside is None else is_inside
        return Reasoning("" if is_open else cls.start, cls.end)

    def _read(self) -> Steps[None]:
        self._hold()
        yield from self._next()
        if (yield from self._accept(self.start)) or self._is_inside:
            self._held = None
            self._out.edge()
            if not (yield from self._until(Markers(self.end), self._think)):
                return
            self._out.edge()
        else:
            self._release()
        yield from self._rest(self._say)


class BracketThinkParser(ThinkTagsParser):
    """Magistral and Ministral."""

    start, end = "[THINK]", "[/THINK]"
    needs_special_tokens = True

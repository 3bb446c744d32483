"""What a client still has to get of its prompts' log-probabilities. It knows no wire."""

from __future__ import annotations

from frontend.choice import Choice
from frontend.request import TextRequest
from frontend.text_delta import TextDelta, TextLogprob, with_alternatives


class PromptScores:
    """all_of, take."""

    def __init__(self, choices: list[Choice], request: TextRequest) -> None:
        """Nothing is owed to a request without prompt_logprobs."""
        self._count = request.options.prompt_logprobs
        self._choices = choices if self._count is not None else []
        self._owed = {choice.index for choice in self._choices}

    def all_of(self, index: int) -> list[TextLogprob]:
        """The scores of the prompt of choice `index`; empty for a client that wants none."""
        if self._count is None:
            return []
        return with_alternatives(self._choices[index].prompt_logprobs, self._count)

    def take(self, delta: TextDelta) -> list[TextLogprob]:
        """The same, once, with the first tokens of the choice: by then its prompt is scored."""
        is_scored = delta.token_ids or delta.finish_reason
        if delta.index not in self._owed or not is_scored:
            return []
        self._owed.discard(delta.index)
        return self.all_of(delta.index)

"""One choice of a request: token deltas in, text deltas out.

Owns the choice's detokenizer, stop strings and token count. It does not know the engine or the
faces; its one signal to the outside is `matched`.
"""

from __future__ import annotations

from array import array
from typing import NamedTuple

from frontend.gap import Gap
from frontend.messages import Delta, Finish, FinishReason, Timings, TokenLogprobs, Usage
from frontend.reading import Reading
from frontend.request import Options
from frontend.stopping import StopChecker
from frontend.text_delta import TextDelta, TextLogprob, with_alternatives
from frontend.tokenizer import Vocabulary
from tidemill.structured import Constraint

_REASONS = {
    FinishReason.STOP_TOKEN: "stop",
    FinishReason.STOP_SEQUENCE: "stop",
    FinishReason.STOP_STRING: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORTED: "abort",
    FinishReason.DEADLINE: "abort",
    FinishReason.ERROR: "error",
    FinishReason.DEAD_END: "error",
}
_BEFORE = 8
"""Tokens of a prompt that are decoded in front of what goes on in its text: enough for a whole
character at its end, which has at most 4 bytes, and what stands around it."""


class PromptView(NamedTuple):
    """A prompt as it was sent to the engine, and its text where it is needed (echo).

    `max_tokens` is the engine's limit behind it; None: the room left. `gap` is there when a suffix
    follows, `constraint` when a grammar says what does. `goes_on`: what is generated goes on in its
    text, as that of completions does; an answer in a chat begins a text of its own.
    """

    token_ids: list[int]
    text: str
    max_tokens: int | None = None
    gap: Gap | None = None
    constraint: Constraint | None = None
    goes_on: bool = True


class Choice:
    """State of one sequence. `matched` is the stop string that ended its text, if one did."""

    def __init__(
        self,
        index: int,
        prompt: PromptView,
        tokenizer: Vocabulary,
        options: Options,
        reading: Reading | None = None,
    ) -> None:
        """Without `reading`, text is told as it stands."""
        self.index = index
        self.prompt = prompt
        self.matched: str | None = None
        self.num_tokens = 0
        self.scored: list[float] = []
        """Log-probabilities of the tokens, where choices are ranked by them."""
        self.usage = Usage()
        self.timings = Timings()
        self.finish: Finish | None = None
        self.prompt_logprobs: list[TextLogprob] = []
        if options.prompt_logprobs is not None or (options.echo and options.logprobs is not None):
            self.prompt_logprobs += [
                TextLogprob(first, *tokenizer.piece(first), None, 0)
                for first in prompt.token_ids[:1]
            ]
        self._tokenizer = tokenizer
        self._options = options
        self._detokenizer = tokenizer.detokenizer(
            skip_special_tokens=options.skip_special_tokens,
            spaces_between_special_tokens=options.spaces_between_special_tokens,
            before=prompt.token_ids[-_BEFORE:] if prompt.goes_on else (),
        )
        self._num_chars = len(prompt.text)
        self._stops: StopChecker | None = None
        if options.stop:
            include = options.include_stop_str_in_output
            self._stops = StopChecker(options.stop, include=include)
        self._owes_echo = options.echo
        self._only_prompt = options.sampling.max_tokens == 0
        self._most_tokens = None if prompt.gap is None else prompt.gap.num_tokens
        self._reading = reading
        self._starts = array("L")
        """Where the texts of the tokens start, for who counts the reasoning."""

    @property
    def reasoning_tokens(self) -> int:
        """Of the tokens up to now, those of the reasoning."""
        return 0 if self._reading is None else self._reading.num_reasoning(self._starts)

    def feed(self, delta: Delta) -> TextDelta | None:
        """The visible part of what happened, or None when nothing can be shown yet."""
        if delta.prompt_logprobs:
            self._add_prompt_logprobs(delta.prompt_logprobs)
        shown = TextDelta(self.index, canvas=delta.canvas)
        texts: list[str] = []
        if delta.token_ids and self.matched is None and not self._only_prompt:
            texts = self._add_tokens(delta, shown)
        if delta.finish is not None:
            self._add_finish(delta.finish, shown)
        if self._owes_echo and (delta.token_ids or delta.finish is not None):
            self._echo(shown)
        if self._reading is not None:
            self._read(self._reading, shown, texts)
        is_empty = not (shown.text or shown.token_ids or shown.finish_reason or shown.canvas)
        return None if is_empty else shown

    def _add_tokens(self, delta: Delta, shown: TextDelta) -> list[str]:
        """The text of each token, where they are fed one by one."""
        token_ids = delta.token_ids
        if self._most_tokens is not None:  # what the engine says behind the gap is the suffix
            token_ids = token_ids[: self._most_tokens - self.num_tokens]
        visible, finish = token_ids, delta.finish
        if (
            finish is not None
            and len(token_ids) == len(delta.token_ids)
            and finish.reason is FinishReason.STOP_TOKEN
            and finish.stop_token_id == token_ids[-1]
            and not self._options.include_stop_str_in_output
        ):
            visible = token_ids[:-1]  # the token that ended the sequence is counted, not shown
        texts: list[str] = []
        offsets: list[int] = []
        is_plain = self._stops is None and self._options.logprobs is None
        if is_plain and self._reading is None:
            shown.text = self._detokenizer.feed(visible)
            num_consumed = len(token_ids)
        else:
            texts, offsets = self._feed_singly(visible)
            shown.text = "".join(texts)
            num_consumed = len(token_ids) if self.matched is None else len(offsets)
        if self._reading is not None:
            self._starts.extend(at - len(self.prompt.text) for at in offsets)
        shown.token_ids = token_ids[:num_consumed]
        self.num_tokens += num_consumed
        if self._options.ranks:
            told = delta.logprobs[:num_consumed]
            self.scored += [entry.logprobs[0] for entry in told if entry.logprobs]
        if self._options.logprobs is not None:
            offsets += [self._num_chars] * (num_consumed - len(offsets))
            rows = zip(shown.token_ids, delta.logprobs, offsets, strict=False)
            shown.logprobs = [self._to_text(*row) for row in rows]
        return texts

    def _feed_singly(self, token_ids: list[int]) -> tuple[list[str], list[int]]:
        """Texts of the tokens up to a stop string, and where each of them begins; sets `matched`.

        One token at a time, because the text ends inside a delta of several tokens. The first
        `min_tokens` tokens cannot contain a stop string.
        """
        stops, min_tokens = self._stops, self._options.sampling.min_tokens or 0
        texts, offsets = [], []
        for num_fed, token_id in enumerate(token_ids, start=1):
            offsets.append(self._num_chars)
            text = self._detokenizer.feed((token_id,))
            self._num_chars += len(text)
            if stops is None:
                texts.append(text)
                continue
            if self.num_tokens + num_fed <= min_tokens:
                texts.append(stops.skip(text))
                continue
            checked = stops.feed(text)
            texts.append(checked.text)
            if checked.matched is not None:
                self.matched = checked.matched
                break
        return texts, offsets

    def _add_finish(self, finish: Finish, shown: TextDelta) -> None:
        self.finish, self.usage, self.timings = finish, finish.usage, finish.timings
        if self.matched is None and not self._only_prompt:
            rest = self._detokenizer.flush()
            if self._stops is not None:
                checked = self._stops.feed(rest)
                self.matched = checked.matched
                rest = checked.text + ("" if checked.matched else self._stops.flush())
            shown.text += rest
        if self.matched is not None:
            shown.finish_reason, shown.stop_reason = "stop", self.matched
            return
        if self._only_prompt or self.num_tokens == self._most_tokens:
            shown.finish_reason = "length"
            return
        shown.finish_reason = _REASONS[finish.reason]
        if finish.stop_token_id in self._options.stop_token_ids:
            shown.stop_reason = finish.stop_token_id
        elif finish.detail:
            shown.stop_reason = finish.detail

    @staticmethod
    def _read(reading: Reading, shown: TextDelta, texts: list[str]) -> None:
        is_last = shown.finish_reason is not None
        if shown.logprobs and len(texts) <= len(shown.logprobs):
            # What the end brings comes with the last token, which may have no text of its own.
            texts = texts + [""] * (len(shown.logprobs) - len(texts))
            texts[-1] += shown.text[sum(map(len, texts)) :]
            said, shown.by_token = reading.read_singly(texts, is_last=is_last)
        else:
            said = reading.read(shown.text, is_last=is_last)
        shown.text, shown.reasoning, shown.calls, shown.parts = said
        # What the client's own stop has cut off is no call to be made.
        is_whole = shown.stop_reason is None or not reading.is_cut_off
        if shown.finish_reason == "stop" and reading.has_calls and is_whole:
            shown.finish_reason = "tool_calls"

    def _echo(self, shown: TextDelta) -> None:
        """The prompt goes in front of the first text. Token ids stay those of the completion."""
        self._owes_echo = False
        shown.text = self.prompt.text + shown.text
        if self._options.logprobs is not None:
            entries = with_alternatives(self.prompt_logprobs, self._options.logprobs)
            shown.logprobs = self._placed(entries) + shown.logprobs

    def _placed(self, entries: list[TextLogprob]) -> list[TextLogprob]:
        """Entries of the prompt with their offsets in its text.

        A special token counts where the text spells it; one that the tokenizer added does not.
        """
        text, at, placed = self.prompt.text, 0, []
        detokenizer = self._tokenizer.detokenizer(skip_special_tokens=True)
        for entry in entries:
            placed.append(entry._replace(offset=at))
            num_chars = len(detokenizer.feed((entry.token_id,)))
            if not num_chars and text.startswith(entry.token, at):
                num_chars = len(entry.token)
            at += num_chars
        return placed

    def _add_prompt_logprobs(self, entries: list[TokenLogprobs]) -> None:
        ids, known = self.prompt.token_ids, self.prompt_logprobs
        for entry in entries:
            known.append(self._to_text(ids[len(known)], entry))

    def _to_text(self, token_id: int, entry: TokenLogprobs, offset: int = 0) -> TextLogprob:
        piece = self._tokenizer.piece
        others = zip(entry.token_ids[1:], entry.logprobs[1:], strict=True)
        top = [
            TextLogprob(other_id, *piece(other_id), value, rank)
            for rank, (other_id, value) in enumerate(others, start=1)
        ]
        text, content = piece(token_id)
        logprob = entry.logprobs[0] if entry.logprobs else None
        return TextLogprob(token_id, text, content, logprob, entry.rank, tuple(top), offset)

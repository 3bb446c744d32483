"""Beam search at the engine, in the place of a Call: one token of every beam per round.

Each round is a request of its own; what it shares with the one ahead of it stands in the engine's
prefix cache. It does not know text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from frontend.beam_rules import stop_ids
from frontend.beam_search import BeamSearch, Hypothesis, num_candidates
from frontend.call import Call
from frontend.engine_convert import pack_ids
from frontend.messages import (
    Delta,
    EngineFacts,
    Finish,
    FinishReason,
    Timings,
    TokenLogprobs,
    Usage,
)
from frontend.messages import Sequence as EngineSequence
from frontend.request import Beam, Options, Sampling

Open = Callable[[list[EngineSequence]], Call]
_NATURAL = (FinishReason.STOP_TOKEN, FinishReason.LENGTH)


def search(
    open_call: Open, sequences: Sequence[EngineSequence], options: Options, facts: EngineFacts
) -> BeamCall:
    """The call that searches for what `options.beam` asks for."""
    assert options.beam is not None, "no beam search was asked for"
    return BeamCall(
        open_call,
        sequences,
        options.beam,
        ends=stop_ids(options, facts),
        max_model_len=facts.max_model_len,
    )


class BeamCall:
    """What a Generation asks of a Call. All choices are told at once, when every search is done."""

    def __init__(
        self,
        open_call: Open,
        sequences: Sequence[EngineSequence],
        beam: Beam,
        *,
        ends: frozenset[int],
        max_model_len: int,
    ) -> None:
        """`sequences` are the choices to fill, the best first and those of one prompt together;
        `ends` are the tokens that stop one."""
        self._open = open_call
        self._beam = beam
        self._ends = ends
        self._call: Call | None = None
        self._usage = Usage()
        self._timings: Timings | None = None
        self._failed: Finish | None = None
        self.has_begun = False
        """Whether anything of the round that runs has arrived. Of those before it nobody has heard:
        the search may begin again at another engine."""
        self._prompt_scores: dict[int, list[TokenLogprobs]] = {}
        """Of a prompt, by the index of its first choice; they come with its first round."""
        self._searches: list[tuple[list[EngineSequence], BeamSearch]] = []
        for sequence in sequences:
            if sequence.choice == 0:
                most = sequence.sampling.max_tokens
                room = max_model_len - len(sequence.prompt) // 4 if most is None else most
                self._searches.append(([], BeamSearch(beam, ends=ends, max_tokens=room)))
            self._searches[-1][0].append(sequence)

    async def read(self) -> list[Delta]:
        """Searches, prompt by prompt; one delta for every choice."""
        deltas: list[Delta] = []
        for group, search in self._searches:
            while not search.is_done and self._failed is None:
                search.advance(await self._score(group[0], search.running))
            found = search.best(len(group))
            # A vocabulary of fewer continuations than choices leaves some without a token.
            found += [Hypothesis()] * (len(group) - len(found))
            scores = self._prompt_scores.pop(group[0].index, [])
            deltas += [self._delta(*pair, scores) for pair in zip(group, found, strict=True)]
        return deltas

    def stop(self, index: int, num_tokens: int, stop_string: str) -> None:
        """Nothing: when a text is read, everything has ended."""

    def close(self, *, abort: bool = True) -> None:
        """Ends the round that runs. Idempotent."""
        if self._call is not None:
            self._call.close(abort=abort)

    async def _score(
        self, asked: EngineSequence, beams: Sequence[Hypothesis]
    ) -> list[TokenLogprobs]:
        """The likeliest next tokens behind every beam."""
        self.has_begun = False
        # Alternatives that are only told are asked for too: they are past those that count.
        count = max(num_candidates(self._beam, self._ends), asked.logprobs or 0)
        is_first = not beams[0].token_ids
        call = self._call = self._open([
            replace(
                asked,
                index=index,
                choice=0,
                prompt=asked.prompt + pack_ids(list(beam.token_ids)),
                sampling=Sampling(temperature=0.0, max_tokens=1),
                logprobs=count,
                prompt_logprobs=asked.prompt_logprobs if is_first else None,
            )
            for index, beam in enumerate(beams)
        ])  # fmt: skip
        scored: dict[int, TokenLogprobs] = {}
        num_left = len(beams)
        try:
            while num_left:
                for delta in await call.read():
                    self.has_begun = True
                    scored.update((delta.index, entry) for entry in delta.logprobs)
                    if delta.prompt_logprobs:
                        told = self._prompt_scores.setdefault(asked.index, [])
                        told += delta.prompt_logprobs
                    if delta.finish is not None:
                        num_left -= 1
                        self._count(delta.finish)
        finally:
            call.close()
        nothing = TokenLogprobs((), (), 0)
        return [scored.get(index, nothing) for index in range(len(beams))]

    def _count(self, finish: Finish) -> None:
        """Adds up what rounds cost; one that did not end by itself ends the search."""
        if finish.reason not in _NATURAL:
            self._failed = self._failed or finish
        used, more, first = self._usage, finish.usage, self._timings
        self._usage = used._replace(
            prompt_tokens=used.prompt_tokens or more.prompt_tokens,
            cached_tokens=used.cached_tokens if first else more.cached_tokens,
            forward_passes=used.forward_passes + more.forward_passes,
            preemptions=used.preemptions + more.preemptions,
        )
        took = finish.timings.prefill_ns + finish.timings.decode_ns
        self._timings = (
            first._replace(decode_ns=first.decode_ns + took) if first else finish.timings
        )

    def _delta(
        self, sequence: EngineSequence, found: Hypothesis, scores: list[TokenLogprobs]
    ) -> Delta:
        count = sequence.logprobs
        entries = [] if count is None else [_cut(entry, count) for entry in found.entries]
        finish = self._failed or Finish(
            FinishReason.STOP_TOKEN if found.has_ended else FinishReason.LENGTH,
            found.token_ids[-1] if found.has_ended else None,
            "",
            self._usage if sequence.index == 0 else Usage(),
            self._timings or Timings(),
        )
        return Delta(sequence.index, list(found.token_ids), entries, scores, finish=finish)


def _cut(entry: TokenLogprobs, count: int) -> TokenLogprobs:
    """The token, and `count` alternatives."""
    return TokenLogprobs(entry.token_ids[: count + 1], entry.logprobs[: count + 1], entry.rank)

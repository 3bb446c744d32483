"""Beam search offline: the frontend's search over rounds of `LLM.generate`.

Each round asks for one token of every beam of every prompt, and what it shares with the round ahead
of it stands in the prefix cache.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from engine_service.core.checks import check_whole
from engine_service.core.facts import EngineFacts
from frontend.beam_rules import check_beam, stop_ids
from frontend.beam_search import BeamSearch, Hypothesis, num_candidates
from frontend.messages import TokenLogprobs
from frontend.request import Beam, Options, TextRequest
from tidemill.given import wrong_kind
from tidemill.outputs import BeamSearchOutput, BeamSearchSequence, RequestOutput
from tidemill.prompts import Prompt, PromptReader, TextPrompt, as_heard, as_list
from tidemill.runtime.errors import InvalidRequest
from tidemill.sampling_params import BeamSearchParams, SamplingParams

MAX_BEAMS = 128


class BeamCalls(ABC):
    """What `LLM` gets of it."""

    facts: EngineFacts
    _reader: PromptReader

    @abstractmethod
    def generate(self, prompts: Any, sampling_params: Any, use_tqdm: bool) -> list[RequestOutput]:
        """See LLM."""

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams
    ) -> list[BeamSearchOutput]:
        """The likeliest answers to every prompt. Autoregressive models only; others raise
        Unsupported."""
        if not isinstance(params, BeamSearchParams):
            raise wrong_kind(
                "params", params, "BeamSearchParams; LLM.generate takes SamplingParams"
            )
        beam = Beam(params.beam_width, params.length_penalty, params.early_stopping)
        ends = self._check(params, beam)
        read = [self._reader.read(one, SamplingParams()) for one in as_list(prompts)]
        searches = [
            BeamSearch(
                beam,
                ends=ends,
                max_tokens=min(params.max_tokens, self._room(one)),
            )
            for one in read
        ]
        pairs = list(zip(read, searches, strict=True))
        scoring = SamplingParams(
            temperature=0.0, max_tokens=1, logprobs=num_candidates(beam, ends), ignore_eos=True
        )
        while running := [pair for pair in pairs if not pair[1].is_done]:
            beams = [one.token_ids + list(h.token_ids) for one, s in running for h in s.running]
            scored = iter(self.generate([{"prompt_token_ids": b} for b in beams], scoring, False))
            for _, search in running:
                search.advance([_entry(next(scored)) for _ in search.running])
        return [
            BeamSearchOutput(sequences=[self._told(one, h) for h in s.best(beam.width)])
            for one, s in pairs
        ]

    def _check(self, params: BeamSearchParams, beam: Beam) -> frozenset[int]:
        """The tokens that end a beam; raises what the service would, with the names used here."""
        check_whole("beam_width", params.beam_width, low=1, high=MAX_BEAMS)
        check_whole("max_tokens", params.max_tokens, low=1)
        options, facts = Options(ignore_eos=params.ignore_eos, beam=beam), as_heard(self.facts)
        request = TextRequest(prompts=(), options=options)
        try:
            check_beam(request, beam, facts, MAX_BEAMS)
        except InvalidRequest as refused:
            if refused.param != "best_of":
                raise
            raise InvalidRequest(refused.message, param="beam_width") from refused
        return stop_ids(options, facts)

    def _room(self, prompt: TextPrompt) -> int:
        """Tokens that the context leaves behind a prompt."""
        room = self.facts.max_model_len - len(prompt.token_ids)
        if room < 1:
            raise InvalidRequest(
                f"the prompt has {len(prompt.token_ids)} tokens, and the context "
                f"{self.facts.max_model_len}: shorten it",
                param="prompt",
            )
        return room

    def _told(self, prompt: TextPrompt, found: Hypothesis) -> BeamSearchSequence:
        answer = found.token_ids[:-1] if found.has_ended else found.token_ids
        tokens = [*prompt.token_ids, *answer]
        return BeamSearchSequence(
            tokens=tokens,
            text=self._reader.text_of(tokens),
            cum_logprob=found.logprob,
            finish_reason="stop" if found.has_ended else "length",
        )


def _entry(output: RequestOutput) -> TokenLogprobs:
    """The alternatives of the one token that was scored, behind that token itself."""
    ((table,),) = (one.logprobs or ({},) for one in output.outputs)
    ids = list(table)
    values = [table[token].logprob for token in ids]
    return TokenLogprobs((ids[0], *ids), (values[0], *values), 1)

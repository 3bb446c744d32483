"""One request's walk: prompts -> token ids -> engine -> text deltas, the same for both faces.

It does not know HTTP or gRPC messages; it owns the request from admission to its log line.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING

from frontend.beam_call import BeamCall, search
from frontend.call import Call
from frontend.calling import with_calls
from frontend.choice import Choice, PromptView
from frontend.choosable import as_requested, as_restricted
from frontend.fleet.route import Route
from frontend.gap import check_gap, check_suffix_ids, check_suffix_len, fit_prompt
from frontend.messages import Delta, Finish, FinishReason, Sequence, Timings, Usage
from frontend.observation import Observation, inner_span
from frontend.ranking import likeliest
from frontend.reading import behind_reasoning, check_tools, reading_of, with_markers
from frontend.request import Chat, Ingress, Prompt, TextRequest, session_of, shared_by
from frontend.result import ChoiceResult
from frontend.sequences import sequence_of
from frontend.served import ServedModel
from frontend.text_delta import TextDelta
from frontend.validation import DEFAULT_COMPLETION_TOKENS, check_request, check_size
from tidemill.runtime.errors import InvalidRequest, ServiceError, Unsupported

if TYPE_CHECKING:
    from frontend.desk import FrontDesk

_GRACE_S = 1.0
"""How much longer than the deadline we wait for the engine's own word that it passed."""
_PROMPT_END = 16
"""Tokens of a prompt that say whether it leaves the reasoning open: a tag and white space."""


class Generation:
    """Use as `async with`: leaving the block ends the request at the engine, whatever happened.

    Inside, either iterate over `deltas()` or await `collect()`, once.
    """

    def __init__(self, desk: FrontDesk, request: TextRequest, ingress: Ingress) -> None:
        self._desk = desk
        self._ingress = ingress
        self._call: Call | BeamCall | None = None
        self._suffix_ids: list[int] = []
        self._is_whole = self._collects = False
        # Of a choice; which ones are returned is known when all have ended.
        self._failure: ServiceError | None = None
        self._span = ingress.span
        self.model: ServedModel = desk.model_for(request.options.model)
        self.called = self.model.called(request.options.model)
        request = shared_by(request, ingress.caller)
        options = request.options
        session = session_of(ingress, options)
        self._route = Route(desk.fleet, self.model.facts, session, options.fairness_key)
        self._request = with_markers(request, self.model.output)
        self.prompts: list[PromptView] = []
        self.choices: list[Choice] = []
        shown = desk.config.log_prompts
        self._seen = Observation(desk.metrics, self.model.name, ingress, request, shown)

    async def __aenter__(self) -> Generation:
        self._desk.entered(self)
        try:
            self._route.check_room(self._request.options.priority)
            check_request(self._request, self.model.facts, self._desk.config.max_n)
            check_tools(self._request, self.model.output, self.model.template.variables)
            self._request = with_calls(self._request, self.model.output)
            options = await self._desk.with_bad_words(self.model, self._request.options)
            self._request = replace(self._request, options=options)
            if self._request.suffix:
                await self._read_suffix(self._request.suffix)
            for prompt in self._request.prompts:
                await self._add_prompt(prompt)
            if self._ingress.use is not None:
                self._ingress.use(self.usage.prompt_tokens)
            self._span = self._seen.start_client_span()
            self._call = self._submit()
        except BaseException as failure:
            await self._leave(failure)
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        failure: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._leave(failure)

    @property
    def usage(self) -> Usage:
        """Tokens up to now; a prompt counts once, whatever its number of choices, and
        choices that are not returned count too."""
        width = max(1, self._request.options.width)
        return Usage(
            prompt_tokens=sum(len(prompt.token_ids) for prompt in self.prompts),
            cached_tokens=sum(choice.usage.cached_tokens for choice in self.choices[::width]),
            output_tokens=sum(choice.num_tokens for choice in self.choices),
            forward_passes=sum(choice.usage.forward_passes for choice in self.choices),
            denoise_steps=sum(choice.usage.denoise_steps for choice in self.choices),
            preemptions=sum(choice.usage.preemptions for choice in self.choices),
            reasoning_tokens=sum(choice.reasoning_tokens for choice in self.choices),
        )

    @property
    def timings(self) -> Timings:
        """Those of the choice that took longest."""
        return max((c.timings for c in self.choices), key=lambda t: t.queue_ns + t.decode_ns)

    async def deltas(self) -> AsyncIterator[list[TextDelta]]:
        """Everything new, a list at a time, until all choices have finished. Raises the request's
        ServiceError: DeadlineExceeded, or why a choice cannot go on: InvalidRequest or
        GenerationFailed.
        """
        num_left = len(self.choices)
        while num_left:
            news = []
            for delta in await self._read():
                choice = self.choices[delta.index]
                was_matched = choice.matched is not None
                shown = choice.feed(delta)
                if delta.finish is not None:
                    num_left -= 1
                    self._check_end(delta.finish)
                elif choice.matched is not None and not was_matched:
                    self._stop_engine(choice)
                if delta.token_ids and not self._is_whole:
                    self._seen.delivered(delta.index)
                if shown is not None:
                    news.append(shown)
            if news:
                yield news

    async def collect(self) -> list[ChoiceResult]:
        """The choices to be returned, finished, in the order of their index: all of them, or with
        best_of the likeliest of each prompt, best first."""
        self._collects = True
        if isinstance(self._call, Call) and not self._request.options.stop:
            # Nothing is told before the end, nor said to the engine: one look is enough.
            self._is_whole = True
            self._call.wait_for_all(self._seen.delivered)
        results = [ChoiceResult(choice.index) for choice in self.choices]
        async for news in self.deltas():
            for delta in news:
                results[delta.index].add(delta)
        results = likeliest(results, self.choices, self._request.options)
        if any(one.finish_reason == "error" for one in results):
            assert self._failure is not None, "a choice ended without its failure"
            raise self._failure
        return results

    def choice_at(self, index: int) -> Choice:
        """A choice that has the prompt, and its scores, of what is returned as choice `index`."""
        options = self._request.options
        return self.choices[index // options.n * options.width + index % options.n]

    async def _read_suffix(self, suffix: str) -> None:
        """Encodes what stands behind every gap; refuses what no engine would take."""
        check_gap(self._request, self.model.facts)
        around = partial(inner_span, self._ingress)
        self._suffix_ids = await self._desk.tokenize(
            self.model, suffix, False, around=around, check=check_suffix_len
        )
        check_suffix_ids(self._suffix_ids)

    async def _add_prompt(self, prompt: Prompt) -> None:
        """Renders, encodes and fits one prompt, and makes its choices."""
        options, model = self._request.options, self.model
        param, text = self._request.prompt_param, prompt if isinstance(prompt, str) else ""
        if isinstance(prompt, tuple):
            token_ids = list(prompt)
        else:
            token_ids = await self._desk.tokenize(
                model,
                prompt,
                options.add_special_tokens,
                around=partial(inner_span, self._ingress),
                check=self._check_size,
            )
        is_default = param == "prompt" and options.sampling.max_tokens is None
        if is_default:
            sampling = replace(options.sampling, max_tokens=DEFAULT_COMPLETION_TOKENS)
            options = replace(options, sampling=sampling)
        fitted, max_tokens, gap = fit_prompt(
            token_ids, self._suffix_ids, options, model.facts, param=param, is_default=is_default
        )
        is_chat = isinstance(prompt, Chat)
        is_read = options.echo or (options.logprobs is not None and not is_chat)
        if is_read and (not text or len(fitted) < len(token_ids)):
            text = model.tokenizer.decode(
                fitted,
                skip_special_tokens=options.skip_special_tokens,
                spaces_between_special_tokens=options.spaces_between_special_tokens,
            )
        end, constraint = "", options.constraint
        if isinstance(prompt, Chat):
            end = model.tokenizer.decode(fitted[-_PROMPT_END:], skip_special_tokens=False)
            constraint = behind_reasoning(constraint, model.output, end, prompt.continued)
        goes_on = not isinstance(prompt, Chat) or prompt.continue_final_message
        view = PromptView(fitted, text, max_tokens, gap, constraint, goes_on)
        self.prompts.append(view)
        for _ in range(options.width):
            reading = None
            if isinstance(prompt, Chat):
                reading = reading_of(prompt, model.output, end, constraint)
            choice = Choice(len(self.choices), view, model.tokenizer, options, reading)
            self.choices.append(choice)

    def _check_size(self, num_tokens: int) -> None:
        """Refuses what cannot fit before the time is spent to encode it."""
        if self._request.options.truncate_prompt_tokens is None:
            limit = self.model.facts.max_model_len
            check_size(num_tokens, self._request, limit, is_exact=False)

    def _submit(self) -> Call | BeamCall:
        options = self._request.options
        sequences = [sequence_of(choice, options) for choice in self.choices]
        if options.beam is None:
            return self._open(sequences)
        return search(self._open, sequences, options, self.model.facts)

    def _open(self, sequences: list[Sequence]) -> Call:
        call = self._route.open(
            self._ingress.request_id,
            sequences,
            timeout_ms=self._remaining_ms(),
            trace=self._span.context,
        )
        if self._is_whole:
            call.wait_for_all(self._seen.delivered)
        return call

    def _remaining_ms(self) -> int | None:
        """At least 1, so that it is the engine that counts and answers a passed deadline."""
        if self._ingress.deadline is None:
            return None
        remaining = self._ingress.deadline - asyncio.get_running_loop().time()
        return max(1, int(1000 * remaining))

    async def _read(self) -> list[Delta]:
        """News of the engine. Until there are any, another engine may be asked instead."""
        deadline = self._ingress.deadline
        while True:
            assert self._call is not None, "deltas() outside of the block"
            try:
                if deadline is None:  # half of a read's cost is its timer
                    return await self._call.read()
                async with asyncio.timeout_at(deadline + _GRACE_S):
                    return await self._call.read()
            except TimeoutError:
                raise self._ingress.too_late() from None
            except (InvalidRequest, Unsupported) as refused:
                raise as_requested(refused, self._request) from refused
            except ServiceError as failure:
                left_ms = self._remaining_ms()
                if self._call.has_begun or not await self._route.goes_on(failure, left_ms):
                    raise
            self._call.close()
            self._call = self._submit()

    def _stop_engine(self, choice: Choice) -> None:
        assert self._call is not None, "a choice fed without a call"
        assert choice.matched is not None, "stopped without a match"
        self._call.stop(choice.index, choice.num_tokens, choice.matched)

    def _check_end(self, finish: Finish) -> None:
        if finish.reason is FinishReason.DEADLINE:
            raise self._ingress.too_late()
        failure = as_restricted(finish.failure, self._request.options)
        if failure is not None:
            self._failure = failure
            if not self._collects:
                raise failure

    async def _leave(self, failure: BaseException | None) -> None:
        """Ends the request on every path. Once its deadline is over, the engine ends it itself."""
        self._desk.left(self)
        deadline = self._ingress.deadline
        is_over = deadline is not None and asyncio.get_running_loop().time() >= deadline
        if self._call is not None:
            self._call.close(abort=not is_over)
        self._route.ended(failure)
        if self._ingress.use is not None:
            self._ingress.use(self.usage.output_tokens)
        self._seen.ended(self, failure)

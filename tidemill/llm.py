"""Offline use: the engine in this process, prompts in, finished texts out.

It does not know gRPC. One thread at a time drives the same scheduler and worker that the service
runs.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Self, cast

from engine_service.composition import compose
from engine_service.core.loop import CoreLoop
from engine_service.core.messages import Abort, Finish, FinishReason
from frontend.choosable import as_asked
from tidemill.beams import BeamCalls
from tidemill.chats import as_prompts
from tidemill.interrupts import unbroken
from tidemill.keywords import engine_config
from tidemill.offline import (
    Line,
    Mailbox,
    NoText,
    Pending,
    calm_collector,
    spread,
    to_submits,
)
from tidemill.outputs import RequestOutput
from tidemill.pooled import PooledCalls, PoolPrompt
from tidemill.progress import progress
from tidemill.prompts import (
    Prompt,
    PromptReader,
    as_list,
    one_per_prompt,
    open_tokenizer,
    with_suffixes,
)
from tidemill.runtime.errors import InvalidRequest, ServiceError
from tidemill.sampling_params import SamplingParams
from tidemill.structured import constraint_of
from tidemill.turns import in_turn

_BESIDE_STEP = 64
"""Requests that are read beside a step, at least: some milliseconds."""


class LLM(BeamCalls, PooledCalls):
    """A model with its engine.

    `model` is a built-in name, a folder or a hub id; the keywords are the fields of EngineConfig
    (`dtype`, `max_model_len`, `page_size`, `load_format`, `seed`, ...), an unknown one is a
    TypeError. With `skip_tokenizer_init` prompts must be token ids and texts stay empty.
    Values that cannot work raise the errors of tidemill.runtime.errors.
    """

    def __init__(
        self, model: str = "demo", *, skip_tokenizer_init: bool = False, **config: Any
    ) -> None:
        self.config = engine_config(model, config, skip_tokenizer_init)
        self.engine = compose(self.config, lambda *progress: None)
        """Its parts, for those who measure them."""
        self.close = self.engine.close
        """Ends other ranks' processes, if any; so does the end of a `with` block, of this object or
        of the program."""
        self.facts = self.engine.facts
        self._turn = threading.RLock()
        self._scheduler = self.engine.scheduler
        self._mail = Mailbox()
        self._loop = CoreLoop(
            inbox=self._mail,
            outbox=self._mail,
            scheduler=self.engine.scheduler,
            executor=self.engine.executor,
            heartbeat_s=math.inf,
        )
        try:
            self._tokenizer = None if skip_tokenizer_init else open_tokenizer(model, self.facts)
        except BaseException:
            self.close()
            vars(self).clear()  # what is raised keeps this object, which would keep the model
            raise
        self._reader = PromptReader(self._tokenizer, self.facts)
        self._ids = itertools.count()
        self._keys = itertools.count(1)
        self._live: dict[int, Line] = {}
        self._requests: dict[str, Pending] = {}
        self._pooled: dict[int, Finish | None] = {}
        """By key: how a prompt that is pooled has ended, if it has."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @in_turn
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Completes every prompt; outputs come in the order of the prompts.

        One SamplingParams serves all prompts, a list gives one per prompt. A request that cannot
        be admitted raises, and the others are given up; without prefix caching the first of them
        run already. Calls from several threads run one after the other.
        """
        listed = as_list(prompts)
        params = one_per_prompt(sampling_params, len(listed))
        taken: dict[str, RequestOutput | None] = {}

        def queue() -> Iterator[None]:
            for prompt, knobs in zip(listed, params, strict=True):
                with unbroken():
                    taken[self._add(prompt, knobs)] = None
                yield

        try:
            with calm_collector(), progress(len(listed), is_shown=use_tqdm) as ended:
                left, queued = len(listed), queue()
                while left:
                    self._feed(queued)
                    for output in self.step():
                        if output.request_id in taken:
                            taken[output.request_id] = output
                            del self._requests[output.request_id]
                            left -= 1
                            ended(output.usage.output_tokens)
        except BaseException:
            self._drop(taken)
            raise
        return [output for output in taken.values() if output is not None]

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        **told: Any,
    ) -> list[RequestOutput]:
        """Renders one conversation, or a list of them, with the chat template and completes it.

        Keywords: `add_generation_prompt`, `continue_final_message`, `template_kwargs`, and `tools`,
        of which the model is told; its calls stand in the text, as it writes them. Everything is
        read as /v1/chat/completions reads it, and refused in the same words.

        The template runs in this process, in jinja's sandbox, which keeps it from files and not
        from computing for long: it is a program of whoever made the model. A served model's runs
        in processes that the kernel bounds. These are started by multiprocessing, which imports
        the caller's main module again, and would run a script that does not expect it twice.
        """
        tokenizer = self._reader.need_tokenizer()
        return self.generate(as_prompts(messages, tokenizer, **told), sampling_params, use_tqdm)

    def infill(
        self,
        prefix: Prompt | Sequence[Prompt],
        suffix: str | Sequence[str],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """What stands between every prefix and its suffix: `max_tokens` tokens, which texts and
        usage are of. Diffusion models only; others raise Unsupported.

        One suffix serves all prefixes, a list gives one per prefix; the rest is as in `generate`.
        """
        return self.generate(with_suffixes(prefix, suffix), sampling_params, use_tqdm)

    def get_tokenizer(self) -> Any:
        """Its tokenizer and chat template as transformers' PreTrainedTokenizerFast, which gives
        texts the token ids that they have here. Needs transformers (tidemill[frontend])."""
        tokenizer = self._reader.need_tokenizer()
        return tokenizer.as_transformers(self.facts.max_model_len)

    @in_turn
    @unbroken()
    def add_request(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> str:
        """Queues one prompt and returns its id; `step` makes it progress.

        Raises the error of a request that can never run.
        """
        return self._add(prompt, *one_per_prompt(sampling_params, 1))

    def _add(self, prompt: Prompt, params: SamplingParams) -> str:
        request_id = f"offline-{next(self._ids)}"
        read = self._reader.read(prompt, params)
        pending = Pending(request_id, read, params, self._tokenizer or NoText())
        asked = constraint_of(params.structured_outputs)
        keys: list[int] = []
        try:
            for line, submit in zip(pending.lines, to_submits(pending, self._keys), strict=True):
                self._scheduler.submit(submit)
                keys.append(submit.key)
                self._live[submit.key] = line
        except ServiceError as refused:
            self._forget(keys)
            raise as_asked(refused, asked, "") from refused
        except Exception:
            self._forget(keys)
            raise
        self._requests[request_id] = pending
        return request_id

    @in_turn
    @unbroken()
    def step(self) -> list[RequestOutput]:
        """One turn of the core loop. Returns what finished in it.

        `get_output` returns the same values later, once each; what it never returned is kept.
        """
        self._loop.turn()
        finished: dict[str, Pending] = {}
        for output in self._mail.take():
            for key, count, stop_string in spread(output, self._live):
                self._scheduler.abort(Abort(key, FinishReason.STOP_STRING, count, stop_string))
            for row, finish in output.finished:
                line = self._live.pop(output.keys[row], None)
                if line is not None:
                    finished[line.request_id] = self._requests[line.request_id]
                elif output.keys[row] in self._pooled:
                    self._pooled[output.keys[row]] = finish
        return [pending.output for pending in finished.values() if pending.is_finished]

    @in_turn
    def get_output(self, request_id: str) -> RequestOutput | None:
        """The request's output, once, when it has finished; else None. Unknown ids raise."""
        if not isinstance(request_id, str) or request_id not in self._requests:
            raise InvalidRequest(f"no request {request_id!r} is live or unread", param="request_id")
        pending = self._requests[request_id]
        if not pending.is_finished:
            return None
        return self._requests.pop(request_id).output

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything to do."""
        return self._scheduler.has_work

    @in_turn
    def _pool(self, prompts: Sequence[PoolPrompt]) -> list[Finish]:
        """Runs prompts that are pooled to their ends; nothing of them is left whatever happens."""
        keys: list[int] = []

        def queue() -> Iterator[None]:
            for prompt in prompts:
                with unbroken():
                    submit = prompt.to_submit(next(self._keys))
                    self._scheduler.submit(submit)
                    keys.append(submit.key)
                    self._pooled[submit.key] = None
                yield

        queued = queue()
        try:
            with calm_collector():
                while self._feed(queued) or any(self._pooled[key] is None for key in keys):
                    self.step()
            return [cast("Finish", self._pooled[key]) for key in keys]
        finally:
            with unbroken():
                for key in keys:
                    self._scheduler.abort(Abort(key))
                    del self._pooled[key]

    def _feed(self, queue: Iterator[None]) -> bool:
        """Lets `queue` queue its requests, one whenever it is asked, until the next step is what it
        would be if all of them waited. Where none runs yet it stops there, so that the device has
        something to do; then more are read beside every step. True: there may be more.

        All are read at once where prompts may find others' prefixes: what they cost a step, and
        which of them wait for a prefix that is being computed, is known when that is planned."""
        limits, scheduler = self.engine.limits, self._scheduler
        least = _BESIDE_STEP if scheduler.load.running else 1
        for count, _ in enumerate(queue, 1):
            load = scheduler.load
            is_fed = limits.are_met(load.waiting, load.waiting_tokens)
            if is_fed and count >= least and not self.config.prefix_caching:
                return True
        return False

    @in_turn
    @unbroken()
    def _drop(self, request_ids: Iterable[str]) -> None:
        """Takes back what a failed call has queued."""
        dropped = set(request_ids)
        self._forget([key for key, line in self._live.items() if line.request_id in dropped])
        for request_id in dropped:
            self._requests.pop(request_id, None)

    def _forget(self, keys: list[int]) -> None:
        for key in keys:
            self._scheduler.abort(Abort(key))
            del self._live[key]

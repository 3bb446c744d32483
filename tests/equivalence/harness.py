"""A whole engine in one object: real core and strategies on a toy model, checked every step."""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from engine_service.core.admission import Admission, Capacity
from engine_service.core.constraint import Grammars, MaskMaker
from engine_service.core.messages import Abort, Finish, Submit
from engine_service.core.pages import PageManager
from engine_service.core.params import DecodingChoice, SamplingParams, SchedulerLimits
from engine_service.core.scheduler import Scheduler
from engine_service.core.step import Canvas, StepPlan, TokenLogprobs
from engine_service.core.strategy import DecodeStrategy, ExecutorLimits, ModelFacts
from engine_service.decoding.autoregressive import Autoregressive
from engine_service.decoding.block_diffusion import BlockDiffusion
from tests.fakes import MASK, VOCAB, ToyExecutor, ToyModel

EOS = 7
AR, BLOCK = "autoregressive", "block_diffusion"


@dataclass
class Result:
    """Everything a request got."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    prompt_logprobs: list[tuple[int, TokenLogprobs]] = field(default_factory=list)
    canvases: list[tuple[int, Canvas]] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    """Of the canvases."""
    finishes: list[Finish] = field(default_factory=list)

    @property
    def finish(self) -> Finish:
        """The one terminal event."""
        (only,) = self.finishes
        return only


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Sizes of an engine."""

    page_size: int = 4
    block: int = 4
    num_pages: int = 64
    max_rows: int = 4
    token_budget: int = 64
    canvas_budget: int = 64
    logit_budget: int = 64
    max_model_len: int = 96
    max_queued_requests: int = 1000
    age_bound_s: float = 30.0
    prefix_caching: bool = True
    overlaps: bool = False
    """A step is launched before the one ahead of it is collected."""
    foreseen_tokens: int = 1 << 30
    num_stages: int = 1
    """As many steps of different rows are in flight."""

    @property
    def depth(self) -> int:
        """As `worker.device.num_beside` has it."""
        return max(self.num_stages - 1, int(self.overlaps))


class ToyEngine:
    """Scheduler, pages and strategies as they ship, on a ToyExecutor; every step is checked."""

    def __init__(
        self,
        model: ToyModel,
        setup: Setup,
        *,
        strategies: dict[str, DecodeStrategy] | None = None,
        default_method: str = AR,
        shifts: dict[str, int] | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        self.setup = setup
        self.masks = MaskMaker(grammars)
        self.now_ns = 1_000_000_000
        self.strategies = strategies or {
            AR: Autoregressive(),
            BLOCK: BlockDiffusion(block=setup.block, mask_token_id=MASK),
        }
        limits = ExecutorLimits(
            setup.num_pages, setup.page_size, setup.max_rows, setup.max_model_len
        )
        self.executor = ToyExecutor(
            model, self.strategies, limits, shifts=shifts, depth=setup.depth
        )
        self.pages = PageManager(
            setup.num_pages, setup.page_size, prefix_caching=setup.prefix_caching
        )
        self.scheduler = Scheduler(
            admission=self._admission(default_method),
            pages=self.pages,
            limits=SchedulerLimits(
                max_rows=setup.max_rows,
                token_budget=setup.token_budget,
                logit_budget=setup.logit_budget,
                canvas_budget=setup.canvas_budget,
                max_queued_requests=setup.max_queued_requests,
                age_bound_s=setup.age_bound_s,
                foreseen_tokens=setup.foreseen_tokens,
                num_cohorts=1 if setup.num_stages == 1 else setup.depth + 1,
            ),
            masks=self.masks,
            clock=lambda: self.now_ns,
        )
        self.results: dict[int, Result] = {}
        self.plans: list[StepPlan] = []
        self._output_seq = 0
        self._flights: deque[tuple[StepPlan, Any]] = deque()

    def _admission(self, default_method: str) -> Admission:
        setup = self.setup
        return Admission(
            model=ModelFacts(
                vocab_size=VOCAB,
                max_model_len=setup.max_model_len,
                eos_token_ids=(EOS,),
                max_logprobs=5,
                weight_version="toy",
                mask_token_id=MASK,
            ),
            grammars=self.masks.grammars,
            capacity=Capacity(
                num_pages=setup.num_pages,
                page_size=setup.page_size,
                token_budget=setup.token_budget,
                logit_budget=setup.logit_budget,
                span_logits=1 << 20,
            ),
            strategies=self.strategies,
            default_method=default_method,
            default_params={},
            defaults=SamplingParams(temperature=0.0),
        )

    def submit(
        self,
        prompt: Sequence[int],
        max_tokens: int | None,
        method: str | None = None,
        knobs: dict[str, Any] | None = None,
        **options: Any,
    ) -> int:
        """Queues a request (ignore_eos unless said otherwise) and returns its key."""
        of_submit = ("priority", "cache_salt", "deadline_ns", "emit_canvas", "choice", "pinned")
        of_submit += ("constraint",)
        outer = {name: options.pop(name) for name in of_submit if name in options}
        key = len(self.results) + 1
        self.scheduler.submit(
            Submit(
                key=key,
                request_id=f"r{key}",
                prompt=struct.pack(f"<{len(prompt)}I", *prompt),
                sampling=SamplingParams(max_tokens=max_tokens, **{"ignore_eos": True, **options}),
                decoding=DecodingChoice(method=method, params=knobs or {}),
                arrival_ns=self.now_ns,
                **outer,
            )
        )
        self.now_ns += 1
        self.results[key] = Result(list(prompt))
        return key

    def step(self) -> bool:
        """One turn, in the loop's order; False when there was nothing to run."""
        self.now_ns += 1_000_000
        plan = self.scheduler.schedule()
        if plan is not None:
            self.plans.append(plan)
            tokens = sum(span.num_tokens for span in plan.spans)
            assert tokens <= self.setup.token_budget
            assert sum(span.num_decided for span in plan.spans) <= self.setup.logit_budget
            self._flights.append((plan, self.executor.launch(plan)))
        if self._flights and (plan is None or len(self._flights) > self.setup.depth):
            self._collect()
        self.scheduler.check_integrity()
        self.collect_output()
        return plan is not None or bool(self._flights)

    def collect_output(self) -> None:
        """Files what the scheduler emitted under its requests."""
        output = self.scheduler.emit()
        if output is None:
            return
        assert output.seq == self._output_seq + 1
        self._output_seq = output.seq
        assert len(set(output.keys)) == len(output.keys)
        token_ids = list(struct.unpack(f"<{sum(output.counts)}I", output.token_ids))
        rows = [self.results[key] for key in output.keys]
        for result, count in zip(rows, output.counts, strict=True):
            assert not (count and result.finishes), "tokens after the end"
            result.tokens += token_ids[:count]
            del token_ids[:count]
        for row, entries in output.logprobs:
            assert len(entries) == output.counts[row]
            rows[row].logprobs += entries
        for row, start, scores in output.prompt_logprobs:
            rows[row].prompt_logprobs += list(enumerate(scores, start))
        for row, shown in output.canvas:
            rows[row].canvases.append((shown.start, shown.canvas))
            rows[row].blocks.append(shown.block)
        for row, finish in output.finished:
            rows[row].finishes.append(finish)

    def run(self, *, max_steps: int = 5000) -> None:
        """Steps until everything is answered, then checks that nothing leaked."""
        for _ in range(max_steps):
            if not self.step() and not self.scheduler.has_work:
                break
        self.check_empty()

    def check_empty(self) -> None:
        """No request, page or row is held; every request got exactly one terminal event."""
        assert not self.scheduler.has_work
        self.scheduler.check_integrity()
        assert self.pages.num_used == 0
        assert [len(result.finishes) for result in self.results.values()] == [1] * len(self.results)

    def preempt(self, key: int) -> bool:
        """Forces a running request out, as a shortage of pages would: once no step is in flight."""
        while self._flights:
            self._collect()
            self.collect_output()
        planner = self.scheduler.planner
        request = planner._running.get(key)
        if request is None:
            return False
        assert not request.in_flight
        planner._preempt(request)
        self.scheduler.check_integrity()
        return True

    def _collect(self) -> None:
        oldest, handle = self._flights.popleft()
        self.scheduler.apply(oldest, self.executor.collect(handle))

    def abort(self, key: int, **fields: Any) -> None:
        """Asks the scheduler to end a request."""
        self.scheduler.abort(Abort(key, **fields))

"""Offline calls read requests beside steps: the steps are those of a call that reads all first."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from engine_service.core.params import SchedulerLimits
from engine_service.core.step import StepPlan
from tidemill.llm import LLM
from tidemill.runtime.errors import InvalidRequest
from tidemill.sampling_params import SamplingParams

PROMPTS = {
    "short": (400, 1, 4, 30),
    "long": (60, 100, 500, 40),
    "mixed": (200, 1, 400, 60),
    "choices": (50, 1, 400, 30),
}
"""Requests, tokens of the shortest and of the longest prompt, most tokens of an output."""


def make(**flags: Any) -> LLM:
    flags = {
        "max_model_len": 600, "token_budget": 1300, "max_rows": 16, "prefix_caching": False, **flags
    }  # fmt: skip
    return LLM(
        flags.pop("model", "demo"),
        executor="simulated",
        simulated_step_ms=0.0,
        skip_tokenizer_init=True,
        **flags,
    )


def draw(kind: str, seed: int) -> tuple[list[list[int]], list[SamplingParams]]:
    count, low, high, most = PROMPTS[kind]
    rng = random.Random(seed)
    prompts = [[rng.randrange(200) for _ in range(rng.randint(low, high))] for _ in range(count)]
    if kind == "choices":  # with one beginning, of three each
        prompts = [prompts[0][: rng.randint(1, 200)] + prompt[:200] for prompt in prompts]
    n = 3 if kind == "choices" else 1
    return prompts, [
        SamplingParams(max_tokens=rng.randint(1, most), ignore_eos=True, seed=index + 1, n=n)
        for index in range(count)
    ]


def watch(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[tuple[StepPlan, int]]:
    """Steps as they are launched, each with the number of requests that had been read by then."""
    launched: list[tuple[StepPlan, int]] = []
    executor, real = llm.engine.executor, llm.engine.executor.launch

    def launch(plan: StepPlan) -> Any:
        launched.append((plan, len(llm._requests)))
        return real(plan)

    monkeypatch.setattr(executor, "launch", launch)
    return launched


def read_all(_: LLM, queue: Iterator[None]) -> bool:
    for _ in queue:
        pass
    return False


@pytest.mark.parametrize("kind", PROMPTS)
@pytest.mark.parametrize("model", ["demo", "demo-block", "demo-canvas"])
def test_steps_are_those_of_a_call_that_reads_all_first(
    kind: str, model: str, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    prompts, params = draw(kind, seed)
    plans, outputs, first_read = [], [], []
    for ahead in (False, True, None):
        with monkeypatch.context() as patch:
            if ahead is False:
                patch.setattr(LLM, "_feed", read_all)
            if ahead is None:  # the control: any number of requests is enough
                patch.setattr(SchedulerLimits, "are_met", lambda *_: True)
            llm = make(model=model)
            launched = watch(llm, patch)
            told = llm.generate(prompts, params, use_tqdm=False)
            outputs.append([[choice.token_ids for choice in one.outputs] for one in told])
            plans.append([plan for plan, _ in launched])
            first_read.append(launched[0][1])
    assert plans[1] == plans[0]
    assert outputs[1] == outputs[0]
    assert first_read[1] < first_read[0] == len(prompts), "nothing is read beside a step"
    if (model, kind) != ("demo-canvas", "choices"):  # of which steps may have room for few rows
        assert plans[2] != plans[0], "the control"


@pytest.mark.parametrize("caching", [True, False])
def test_all_are_read_first_where_prompts_may_find_prefixes(
    caching: bool, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Prompts that cost a step little: their tokens do not say how many it takes."""
    rng = random.Random(seed)
    begin = [rng.randrange(200) for _ in range(500)]
    prompts = [[*begin, rng.randrange(200)] for _ in range(100)]
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    llm = make(prefix_caching=caching)
    launched = watch(llm, monkeypatch)
    llm.generate(prompts, params, use_tqdm=False)
    rows = [plan.num_spans for plan, _ in launched]
    assert (launched[0][1] == len(prompts)) is caching
    assert (max(rows) == 16) is caching, "a step of cached prompts is full of rows"


@pytest.mark.parametrize(("flags", "num_waiting", "num_tokens", "met"), [
    ({}, 2, 100, True),
    ({}, 2, 99, False),
    ({}, 8, 8, True),
    ({}, 7, 99, False),
    ({"num_cohorts": 2}, 7, 100, False),
    ({"num_cohorts": 2}, 8, 100, True),
])  # fmt: skip
def test_a_step_is_full_of_tokens_or_of_rows(
    flags: dict[str, int], num_waiting: int, num_tokens: int, met: bool
) -> None:
    """Where steps share the rows that there are, tokens do not say how many rows each gets."""
    limits = SchedulerLimits(
        max_rows=8,
        token_budget=100,
        logit_budget=100,
        canvas_budget=100,
        max_queued_requests=1000,
        age_bound_s=1.0,
        **flags,
    )
    assert limits.are_met(num_waiting, num_tokens) is met


def test_a_late_request_that_cannot_be_admitted_leaves_nothing_of_the_others(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    prompts, params = draw("mixed", seed)
    llm = make()
    want = [one.outputs[0].token_ids for one in llm.generate(prompts, params, use_tqdm=False)]
    launched = watch(llm, monkeypatch)
    with pytest.raises(InvalidRequest, match="601"):
        llm.generate([*prompts, [1] * 601], [*params, params[0]], use_tqdm=False)
    assert launched, "the first requests had run"
    assert not llm._live
    assert not llm._requests
    got = [one.outputs[0].token_ids for one in llm.generate(prompts, params, use_tqdm=False)]
    assert got == want
    assert not llm.has_unfinished_requests
    assert llm.engine.scheduler.load.pages_used == 0

"""Steps that run ahead of all requests are steps of that model, and leave nothing behind."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace as Facts

import pytest
import torch

from engine_service.kernels import jit
from engine_service.worker import build_kernels as ahead
from engine_service.worker import device
from engine_service.worker.build_kernels import typical_steps
from tidemill import LLM, SamplingParams
from tidemill.runtime.errors import InvalidRequest

KINDS = (
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.9, "seed": 1},
    {"temperature": 0.8, "top_k": 5, "seed": 2, "logprobs": 2},
)


def tokens(model: str) -> list[list[int]]:
    with LLM(model, max_rows=8, max_model_len=256, token_budget=512) as llm:
        params = [SamplingParams(max_tokens=12, **kind) for kind in KINDS]
        outputs = llm.generate(["2 + 2 =", "reverse abc", "copy x y z"], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@cache
def plain_tokens(model: str) -> list[list[int]]:
    """Those of an engine that runs nothing ahead."""
    return tokens(model)


@pytest.mark.parametrize("model", ["demo", "demo-block", "demo-canvas"])
def test_answers_are_the_same_behind_them(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, where it is not needed: torch checks every index there."""
    plain = plain_tokens(model)
    ran: list[int] = []

    def counted(program: object, spans: list[object], *rest: object) -> None:
        ran.append(len(spans))
        run(program, spans, *rest)

    run = ahead._run
    monkeypatch.setattr(ahead, "runs_triton", lambda _: True)
    monkeypatch.setattr(ahead, "_run", counted)
    assert tokens(model) == plain
    assert len(ran) > 20
    assert max(ran) == 8, "as many rows as there are"


def test_an_engine_with_a_kernel_that_cannot_be_built_starts_without_any(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It answers the same; any other error, the control, ends it."""
    plain, run, cpu = plain_tokens("demo"), ahead._run, torch.device("cpu")
    failure, ran = "Triton Error [CUDA]: out of resources", []

    def fail(program: object, spans: list[object], *rest: object) -> None:
        ran.append(len(spans))
        if len(spans) == 8:
            raise RuntimeError(failure)
        run(program, spans, *rest)

    def with_kernels() -> None:
        """As far as a CPU can: they are said to run there."""
        monkeypatch.setattr(jit, "_FAULTS", {cpu: None})

    monkeypatch.setattr(ahead, "runs_triton", lambda _: jit.kernel_fault(cpu) is None)
    monkeypatch.setattr(ahead, "_run", fail)
    monkeypatch.setattr(device, "tell_kernel_fault", lambda at: told.append(jit.kernel_fault(at)))
    told: list[str | None] = []
    with_kernels()
    assert tokens("demo") == plain
    assert told == [f"RuntimeError: {failure}"]
    assert ran.count(8) == 1, "nothing is built where there are no kernels"
    failure = "something else"
    with_kernels()
    with pytest.raises(RuntimeError, match=failure):
        tokens("demo")
    failure = "Triton Error [CUDA]: out of memory"
    with_kernels()
    with pytest.raises(InvalidRequest, match="pass less --num-pages"):
        tokens("demo")


def test_steps_fit_any_engine() -> None:
    """No step exceeds the budgets, whatever they are, and prompts stand beside rows in some."""
    for block, shift in ((1, 1), (4, 0), (32, 0)):
        traits = Facts(mask_block=block, logits_shift=shift)
        for budget, rows, width in ((32, 1, 64), (512, 8, 256), (8192, 256, 2112), (64, 3, 4096)):
            resolved = Facts(token_budget=budget, max_rows=rows, table_width=width)
            steps = list(typical_steps(resolved, traits, 99))  # type: ignore[arg-type]
            assert steps
            for spans in steps:
                assert sum(span.num_tokens for span in spans) <= budget
                assert len(spans) <= rows
                assert all(0 <= span.start < span.stop <= width for span in spans)
                assert all(span.decide_stop < width for span in spans), "the mask token's place"
            is_mixed = [len({span.num_tokens for span in spans}) > 1 for spans in steps]
            assert any(is_mixed) == (budget > 64 or (block < 32 and rows > 1))

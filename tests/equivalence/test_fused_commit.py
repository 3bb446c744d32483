"""A finished block stored by the next block's first span is what a step of its own stores."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest

from engine_service.core.step import Canvas, Decision, Span, Update
from engine_service.core.strategy import Budget, View
from engine_service.decoding.block_diffusion import BlockDiffusion
from tests.equivalence.harness import BLOCK, Result, Setup, ToyEngine
from tests.equivalence.references import random_knobs, random_prompt
from tests.equivalence.test_padding import BLOCK as SIZE
from tests.equivalence.test_padding import MASK as SHIPPED_MASK
from tests.equivalence.test_padding import as_block_model
from tests.fakes import MASK, ToyModel
from tests.models.checkpoints import Case, write
from tidemill.llm import LLM
from tidemill.sampling_params import SamplingParams

Kind = type[BlockDiffusion]


REAL_PLAN, REAL_SETTLE = BlockDiffusion.plan, BlockDiffusion.settle


def plan_apart(self: BlockDiffusion, view: View, budget: Budget) -> Span | None:
    """Has room for one block a step: a finished block is stored first, then the next one opens."""
    alone = Budget(min(budget.tokens, self.min_tokens_per_step), budget.logits)
    span = REAL_PLAN(self, view, alone)
    return span if span is not None and budget.allows(span) else None


def settle_unstored(
    self: BlockDiffusion, committed_len: int, canvas: Canvas, span: Span, decision: Decision | None
) -> Update:
    """Opens the next block over keys and values that were computed beside masks."""
    update = REAL_SETTLE(self, committed_len, canvas, span, decision)
    opened = update.canvas.token_ids == (self.mask_token_id,) * SIZE
    is_full = decision is not None and opened and update.commit
    return update._replace(num_cached=span.stop) if is_full else update


class Separate(BlockDiffusion):
    plan = plan_apart


class Unstored(BlockDiffusion):
    settle = settle_unstored


def is_fused(span: Span) -> bool:
    """It stores a block that is finished, and decides on the next one."""
    first_stored = max(span.start, span.store_from)
    return span.num_decided > 0 and span.decide_start // SIZE > first_stored // SIZE


def toy_results(kind: Kind, seed: int, *, shift: int = 0) -> tuple[list[Result], int]:
    """What six requests get, and how many spans stored one block and opened another."""
    rng = random.Random(seed)
    engine = ToyEngine(
        ToyModel(seed),
        Setup(block=SIZE),
        strategies={BLOCK: kind(block=SIZE, mask_token_id=MASK, logits_shift=shift)},
        default_method=BLOCK,
        shifts={BLOCK: shift},
    )
    for number in range(6):
        knobs, temperature = random_knobs(rng, SIZE), rng.choice([0.0, 1.0])
        options = {"temperature": temperature, "seed": number, "logprobs": 3}
        engine.submit(random_prompt(rng, 1, 12), 18, BLOCK, knobs, emit_canvas=True, **options)
    engine.run()
    count = sum(is_fused(span) for plan in engine.plans for span in plan.spans)
    return list(engine.results.values()), count


def confidences(result: Result) -> list[float]:
    """How sure the model was of every position of every canvas shown."""
    return [one for _, canvas in result.canvases for one in canvas.confidence or ()]


def check_same(ones: list[Result], others: list[Result]) -> None:
    """Tokens equal; log-probabilities and confidences too, up to the order of additions."""
    for one, other in zip(ones, others, strict=True):
        assert one.tokens == other.tokens, "other tokens"
        for mine, yours in zip(one.logprobs, other.logprobs, strict=True):
            assert mine is not None
            assert yours is not None
            assert mine.token_ids == yours.token_ids
            assert mine.logprobs == pytest.approx(yours.logprobs, abs=1e-6)
        assert confidences(one) == pytest.approx(confidences(other), abs=1e-6)


@pytest.mark.parametrize("shift", [0, 1])
def test_a_block_is_stored_with_the_next_one_as_by_itself(shift: int, seed: int) -> None:
    num_opened = 0
    for number in range(seed, seed + 4):
        fused, num_fused = toy_results(BlockDiffusion, number, shift=shift)
        separate, none_fused = toy_results(Separate, number, shift=shift)
        assert num_fused > 0 == none_fused
        check_same(fused, separate)
        for one, other in zip(fused, separate, strict=True):
            assert one.finish.usage.forward_passes < other.finish.usage.forward_passes
            num_opened += len(confidences(one))
    assert num_opened > 0, "no confidence was compared"


def test_control_a_block_that_is_not_stored_again_shows() -> None:
    pairs = [(toy_results(Unstored, n)[0], toy_results(Separate, n)[0]) for n in range(4)]
    unstored, separate = ([one for pair in pairs for one in pair[side]] for side in (0, 1))
    with pytest.raises(AssertionError):
        check_same(unstored, separate)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A block-diffusion checkpoint in float32."""
    made = tmp_path_factory.mktemp("block")
    case = Case(name="block", kind="Qwen3", options={"head_dim": 16}, edit=as_block_model)
    write(case, made, seed=5)
    return made


class Scored(NamedTuple):
    """An answer of the whole engine, with the log-probability of every token."""

    token_ids: list[int]
    logprobs: list[float]
    num_passes: int


def shipped(folder: Path, seed: int, kind: Kind) -> list[Scored]:
    """Out of the whole engine, whose method plans and settles as `kind` does; a rule each."""
    draw = random.Random(seed)
    prompts = [[draw.randrange(SHIPPED_MASK) for _ in range(length)] for length in (5, 1, 12, 8)]
    rules: list[dict[str, Any]] = [{"threshold": threshold} for threshold in (0.0, 0.05, 2.0)]
    rules.append({"remasking": "sequential", "steps": 2})
    common: dict[str, Any] = {"temperature": 0.0, "max_tokens": 18, "ignore_eos": True}
    params = [SamplingParams(logprobs=1, method_params=rule, **common) for rule in rules]
    with patch.multiple(BlockDiffusion, plan=kind.plan, settle=kind.settle):
        llm = LLM(
            str(folder), device="cpu", dtype="float32", max_model_len=64, skip_tokenizer_init=True
        )
        outputs = llm.generate(prompts, params, use_tqdm=False)
    made = []
    for output in outputs:
        (one,) = output.outputs
        assert one.logprobs is not None
        pairs = zip(one.token_ids, one.logprobs, strict=True)
        scores = [entry[token].logprob for token, entry in pairs]
        made.append(Scored(one.token_ids, scores, output.usage.forward_passes))
    return made


def check_shipped(ones: list[Scored], others: list[Scored]) -> None:
    for one, other in zip(ones, others, strict=True):
        assert one.token_ids == other.token_ids, "other tokens"
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


def test_the_whole_engine_stores_a_block_with_the_next_one(folder: Path, seed: int) -> None:
    fused, separate = (shipped(folder, seed, kind) for kind in (BlockDiffusion, Separate))
    check_shipped(fused, separate)
    for one, other in zip(fused, separate, strict=True):
        assert one.num_passes < other.num_passes


def test_control_the_whole_engine_without_storing_again_shows(folder: Path) -> None:
    unstored, separate = (shipped(folder, 1, kind) for kind in (Unstored, Separate))
    with pytest.raises(AssertionError):
        check_shipped(unstored, separate)

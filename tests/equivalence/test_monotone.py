"""What a rule has revealed stays as it is, every step reveals, and steps are bounded."""

from __future__ import annotations

import random

import pytest

from engine_service.core.step import Canvas, Decision, Span, Update
from engine_service.decoding.block_diffusion import BlockDiffusion
from engine_service.sampling.batch import DecideBatch, DecideResult
from tests.equivalence.harness import BLOCK, Result, Setup, ToyEngine
from tests.equivalence.references import RULES, random_knobs, random_prompt
from tests.equivalence.rule_reference import DREAM, READS
from tests.equivalence.test_rules import SIZE, unsure_model
from tests.fakes import MASK, ToyModel

CAREFUL = {
    "threshold": 1.5,
    "steps": SIZE,
    "factor": 0.0,
    "entropy_bound": 0.0,
    "max_parallel": 1,
    "start_threshold": 0.9,
    "low_threshold": 1.5,
    "alg_temp": 0.0,
}


class Revising(BlockDiffusion):
    """Decides the last revealed position of every span once more, and against its first choice."""

    def decide(self, batch: DecideBatch) -> DecideResult:
        result, fixed = super().decide(batch), batch.tables.fixed
        assert result.final is not None
        for start, stop in zip(batch.cu_decide[:-1], batch.cu_decide[1:], strict=True):
            (places,) = result.final[start:stop].nonzero(as_tuple=True)
            if 1 < len(places) < stop - start:
                at = start + places[-1]
                result.token_ids[at] = (result.token_ids[at] + 1) % MASK
                row, position = batch.rows[at], batch.positions[at]
                assert fixed[row, position]
                batch.tables.tokens[row, position] = result.token_ids[at]
        return result


class Hiding(BlockDiffusion):
    """Opens the first revealed position of a canvas again."""

    def settle(
        self, committed_len: int, canvas: Canvas, span: Span, decision: Decision | None
    ) -> Update:
        update = super().settle(committed_len, canvas, span, decision)
        fixed, token_ids = list(update.canvas.fixed), list(update.canvas.token_ids)
        if canvas.step % 2 and fixed.count(True) > 1:
            first = fixed.index(True)
            fixed[first], token_ids[first] = False, MASK
        hidden = update.canvas._replace(fixed=tuple(fixed), token_ids=tuple(token_ids))
        return update._replace(canvas=hidden)


class Idle(BlockDiffusion):
    """The first decision of every block is thrown away."""

    def settle(
        self, committed_len: int, canvas: Canvas, span: Span, decision: Decision | None
    ) -> Update:
        update = super().settle(committed_len, canvas, span, decision)
        if decision is None or canvas.step or span.decide_stop <= committed_len:
            return update
        return update._replace(commit=[], logprobs=None, canvas=canvas._replace(step=1))


def toy_engine(model: ToyModel, kind: type[BlockDiffusion], max_rows: int = 4) -> ToyEngine:
    return ToyEngine(
        model,
        Setup(block=SIZE, max_rows=max_rows),
        strategies={BLOCK: kind(block=SIZE, mask_token_id=MASK)},
        default_method=BLOCK,
    )


def check_growth(result: Result, *, may_idle: bool) -> None:
    """Every canvas holds what the one before it showed, and more unless steps `may_idle`."""
    whole, begin = result.prompt + result.tokens, len(result.prompt)
    shown: dict[int, int] = {}
    for start, canvas in result.canvases:
        fixed = dict(enumerate(zip(canvas.token_ids, canvas.fixed, strict=True), start))
        now = {p: token for p, (token, is_fixed) in fixed.items() if is_fixed}
        now |= dict(enumerate(whole[begin:start], begin))
        assert shown.items() <= now.items(), "what was revealed has changed"
        assert len(now) > len(shown) or may_idle, "a step revealed nothing"
        shown = now
    assert all(whole[p] == token for p, token in shown.items()), "what was revealed has changed"


def grown(name: str, number: int, seed: int, kind: type[BlockDiffusion]) -> tuple[Result, int]:
    """Two blocks behind a prompt that ends on a border, and the most steps of them.

    The first request takes many steps, others may take one per block and have no canvas to show.
    """
    rng, model = random.Random(f"{seed} {number}"), unsure_model(seed)
    knobs = random_knobs(rng, SIZE, (name,))
    if number == 0:
        knobs |= {knob: CAREFUL[knob] for knob in READS[name]}
    engine = toy_engine(model, kind)
    temperature = rng.choice([0.0, 1.0])
    options = {"temperature": temperature, "seed": number, "emit_canvas": True}
    key = engine.submit([1] * SIZE, 2 * SIZE, BLOCK, knobs, **options)
    engine.run()
    return engine.results[key], 2 * (knobs["steps"] if name in (*DREAM, "random") else SIZE)


@pytest.mark.parametrize("name", RULES)
def test_what_is_revealed_stays_and_steps_are_bounded(name: str, seed: int) -> None:
    for number in range(3):
        result, most = grown(name, number, seed, BlockDiffusion)
        check_growth(result, may_idle=name in DREAM)
        assert result.finish.usage.denoise_steps <= most
        assert result.canvases or number


@pytest.mark.parametrize("name", ["threshold", "low_confidence"])
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Revising, "what was revealed has changed"),
        (Hiding, "what was revealed has changed"),
        (Idle, "a step revealed nothing"),
    ],
)
def test_control_a_method_that_takes_back_or_idles_shows(
    kind: type[BlockDiffusion], words: str, name: str
) -> None:
    result, _ = grown(name, 0, 3, kind)
    with pytest.raises(AssertionError, match=words):
        check_growth(result, may_idle=False)


def preempted(seed: int, kind: type[BlockDiffusion]) -> list[Result]:
    """Requests of all rules that are preempted now and then."""
    rng, model = random.Random(seed), ToyModel(seed)
    engine = toy_engine(model, kind, max_rows=2)
    for _ in range(6):
        engine.submit(random_prompt(rng, 1, 12), 24, BLOCK, random_knobs(rng, 8), emit_canvas=True)
    while engine.scheduler.has_work:
        engine.step()
        if rng.random() < 0.2:
            engine.preempt(rng.randint(1, 6))
    return list(engine.results.values())


def check_preempted(results: list[Result]) -> None:
    """Canvas rows only grow, streamed tokens are their fixed prefix, and every step reveals."""
    for result in results:
        shown: dict[int, int] = {}
        whole = result.prompt + result.tokens
        for start, canvas in result.canvases:
            assert (start + len(canvas.token_ids)) % SIZE == 0
            for position, (token, fixed) in enumerate(
                zip(canvas.token_ids, canvas.fixed, strict=True), start
            ):
                assert fixed or token == MASK
                if fixed:
                    assert shown.setdefault(position, token) == token, "another token"
        assert all(whole[p] == t for p, t in shown.items() if p < len(whole)), "another token"
        usage = result.finish.usage
        # A block of the adaptive rule starts anew after a preemption.
        assert usage.denoise_steps <= 32 + SIZE * usage.preemptions


def test_revealed_positions_never_change_under_preemption(seed: int) -> None:
    check_preempted(preempted(seed, BlockDiffusion))


def test_control_a_token_that_changes_under_preemption_shows() -> None:
    results = preempted(3, Revising)
    with pytest.raises(AssertionError, match="another token"):
        check_preempted(results)

"""The output head multiplies positions that are open, of every architecture that reveals them in
any order, and what is answered stays."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from engine_service.composition import Engine
from engine_service.sampling import sampler
from engine_service.sampling.batch import DecideBatch
from tests.equivalence import test_ranks_in_threads
from tests.equivalence.engine_runs import run
from tests.equivalence.ranks_in_threads import run_ranks
from tests.equivalence.shapes import SHAPES
from tests.equivalence.test_last_layer import make_engine, rows_of, write
from tests.equivalence.test_ranks_in_threads import REQUESTS, answers
from tests.sampling_batches import choosing_all

MASKED = [
    name
    for name, shape in SHAPES.items()
    if "mask_token_id" in shape.config or shape.config["architectures"][0].startswith("LLaDA")
]
RULES: dict[str, dict[str, Any]] = {
    "schedule": {},
    "one by one": {"threshold": 2.0, "remasking": "threshold"},
    "threshold": {"threshold": 0.005, "remasking": "threshold"},
    "editing": {"threshold": 0.005, "remasking": "threshold", "edit_threshold": 0.004},
}


class Seen:
    """Positions decided, those of them that were open, and rows that were chosen for."""

    def __init__(self) -> None:
        self.decided = self.open = self.chosen = 0

    def looking(self) -> Any:
        """Notes of every decision inside, of all engines."""
        choose = sampler.choose_with_confidence

        def looked(batch: DecideBatch, draws: torch.Tensor, held: Any = None) -> Any:
            # A part of a batch knows no spans.
            if len(batch.span_rows):
                self.decided += len(batch.positions)
                self.open += int((~batch.tables.fixed[batch.rows, batch.positions]).sum())
                self.chosen += sampler._num_chosen(batch)
            return choose(batch, draws, held)

        return patch("engine_service.decoding.reveal.choose_with_confidence", looked)


def ask(monkeypatch: pytest.MonkeyPatch, *, is_scored: bool) -> None:
    """Whether any request wants log-probabilities: then all positions are multiplied. A constraint
    goes with one rule alone."""
    dropped = {"bad_words"} | (set() if is_scored else {"logprobs", "prompt_logprobs"})
    kept = [{key: one[key] for key in one if key not in dropped} for one in REQUESTS]
    monkeypatch.setattr(test_ranks_in_threads, "REQUESTS", kept)


def knobs_of(name: str, rule: str) -> dict[str, Any]:
    knobs = SHAPES[name].knobs
    if RULES[rule]:
        knobs = {key: value for key, value in knobs.items() if key != "steps"} | RULES[rule]
    return knobs


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", MASKED)
def test_every_answer_stays(
    tmp_path: Path, name: str, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Filters, penalties, masks and draws in one batch; rows alone at its end. Log-probabilities
    change no token, so that one run that chooses for all positions is what both are held to."""
    knobs, num_scored = knobs_of(name, rule), []
    ask(monkeypatch, is_scored=True)
    with choosing_all():
        wanted = answers(make_engine(tmp_path, name), knobs)
    assert len({tuple(one) for one in wanted[0]}) > 3
    for is_scored in (True, False):
        ask(monkeypatch, is_scored=is_scored)
        seen = Seen()
        with seen.looking():
            tokens, ids, values = answers(make_engine(tmp_path, name), knobs)
        assert seen.open <= seen.chosen
        is_guided = "cfg_scale" in knobs  # its logits are multiplied before
        assert seen.chosen < seen.decided or is_scored or is_guided or rule != "schedule"
        assert tokens == wanted[0]
        num_scored.append(sum(map(len, values)))
        if is_scored:
            assert ids == wanted[1]
            for one, other in zip(values, wanted[2], strict=True):
                assert one == pytest.approx(other, abs=1e-4)
    assert num_scored[0] > num_scored[1] == 0


def head_rows(engine: Engine) -> list[int]:
    """Rows that the output head gets, decision by decision, from now on."""
    model, seen = engine.executor._runner._program.model, []
    own = model.head_factors

    def counted(hidden: torch.Tensor) -> Any:
        seen.append(len(hidden))
        return own(hidden)

    object.__setattr__(model, "head_factors", counted)
    return seen


CANVASES = ["llada", "llada-dual", "dream"]


@pytest.mark.parametrize("name", ["sdar", "llada2-moe", *CANVASES])
def test_the_last_layer_and_the_head_get_the_open_positions(tmp_path: Path, name: str) -> None:
    """One of a block falls in each step: 8, 7, ... 1 where one decision follows the other."""
    engine = make_engine(tmp_path, name)
    block = min(8, engine.executor._runner._program.model.traits.mask_block)
    steps = {"block_length": 8, "steps": 16} if name in CANVASES else {"steps": block}
    knobs = [SHAPES[name].knobs | steps | {"remasking": "low_confidence"}]
    rows, (_, ends) = head_rows(engine), rows_of(engine)
    run(engine, [list(range(1, 17))], 16, knobs)
    assert rows == [*range(block, 0, -1)] * (16 // block)
    assert ends == rows
    alone = sum(rows)
    with choosing_all():
        engine = make_engine(tmp_path, name)
        rows = head_rows(engine)
        run(engine, [list(range(1, 17))], 16, knobs)
    assert sum(rows) > alone


@pytest.mark.parametrize("is_scored", [True, False], ids=["with log-probabilities", "without"])
def test_ranks_choose_for_the_same_few(
    tmp_path: Path, is_scored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(monkeypatch, is_scored=is_scored)
    flags = write(tmp_path, "sdar") | {"max_rows": 4, "max_model_len": 64, "page_size": 8}
    together = run_ranks(monkeypatch, 2, lambda engine: answers(engine, {}), **flags)
    with choosing_all():
        wanted = run_ranks(monkeypatch, 2, lambda engine: answers(engine, {}), **flags)
    assert together[0][:2] == together[1][:2] == wanted[0][:2]


@pytest.mark.parametrize("name", ["sdar", "llada"])
def test_control_too_few_of_them_give_other_answers(tmp_path: Path, name: str) -> None:
    own = sampler._num_chosen
    prompts, knobs = [list(range(1, 17))], [SHAPES[name].knobs]
    wanted = run(make_engine(tmp_path, name), prompts, 16, knobs)
    with patch.object(sampler, "_num_chosen", lambda batch: max(1, own(batch) - 3)):
        assert run(make_engine(tmp_path, name), prompts, 16, knobs) != wanted

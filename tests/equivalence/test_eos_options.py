"""LLaDA's end-of-sequence options, core and worker together, against the authors' loop.

`eos_last` is their confidence_eos_eot_inf, and `min_tokens` as long as the answer their
logits_eos_inf.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_service.composition import Engine
from engine_service.decoding import reveal
from engine_service.sampling import sampler
from tests.equivalence.engine_runs import run
from tests.equivalence.oracles_dense import DenseLLaDA
from tests.equivalence.oracles_llada import llada_generate
from tests.equivalence.test_worker_canvas import ANSWER, MASK, write_llada
from tests.equivalence.test_worker_engine import make_engine, make_prompts

WIDTHS, SEEDS = (0.15, 0.2, 0.3, 0.5), (1, 2)
SIZES = [(8, 24), (8, 12), (24, 24), (24, 6)]
"""Lengths of blocks, and steps."""
EOT_NAME = "<|eot_id|>"

Asked = list[tuple[list[int], tuple[int, int]]]


class Case:
    """Random weights, of which the two tokens that come most often are EOS and EoT."""

    def __init__(self, folder: Path, width: float, seed: int) -> None:
        self.folder, self.dense = folder, write_llada(folder, seed, width=width)
        rng = random.Random(seed)
        self.asked: Asked = [(prompt, rng.choice(SIZES)) for prompt in make_prompts(rng, 5)]
        self.wanted = cache(self._wanted)
        tokens = Counter(token for answer in self.wanted() for token in answer)
        (self.eos, _), (self.eot, _) = tokens.most_common(2)
        write_llada(folder, seed, width=width, eos_token_id=self.eos)
        # As published: the tokenizer has it, config.json does not name it.
        names = {"added_tokens": [{"content": EOT_NAME, "id": self.eot}]}
        (folder / "tokenizer.json").write_text(json.dumps(names))

    def _wanted(self, **options: bool) -> list[list[int]]:
        """The authors' answers."""
        ids = {"eos_id": self.eos, "eot_id": self.eot} if options else {}
        return [one(self.dense, prompt, sizes, **ids, **options) for prompt, sizes in self.asked]

    @cached_property
    def engine(self) -> Engine:
        """Keeps nothing of what it was asked: full canvases without a cache."""
        return make_engine(self.folder)

    def ours(self, *, eos_last: bool = False, **sampling: Any) -> list[list[int]]:
        knobs = [
            {"remasking": "low_confidence", "block_length": block, "steps": steps}
            | ({"eos_last": True} if eos_last else {})
            for _, (block, steps) in self.asked
        ]
        prompts = [prompt for prompt, _ in self.asked]
        return run(self.engine, prompts, ANSWER, knobs, **sampling)[0]


def one(dense: DenseLLaDA, prompt: list[int], sizes: tuple[int, int], **options: Any) -> list[int]:
    block, steps = sizes
    lengths = {"gen_length": ANSWER, "block_length": block, "steps": steps}
    return llada_generate(dense.logits, prompt, mask_id=MASK, **lengths, **options).tokens


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> list[Case]:
    return [
        Case(tmp_path_factory.mktemp("llada"), width, seed) for width in WIDTHS for seed in SEEDS
    ]


def test_eos_last_is_lladas_option(cases: list[Case]) -> None:
    changed = 0
    for case in cases:
        wanted = case.wanted(confidence_eos_eot_inf=True)
        assert case.ours(eos_last=True) == wanted
        changed += wanted != case.wanted()
    assert changed > len(cases) // 2, "the control: the option is seen"


def test_min_tokens_is_lladas_option(cases: list[Case]) -> None:
    changed = 0
    for case in cases:
        wanted = case.wanted(logits_eos_inf=True)
        assert case.ours(min_tokens=ANSWER, ignore_eos=False) == wanted
        assert not any(case.eos in tokens for tokens in wanted)
        changed += wanted != case.wanted()
    assert changed > len(cases) // 2, "the control: the option is seen"


def test_both_options_together(cases: list[Case]) -> None:
    for case in cases[::2]:
        wanted = case.wanted(logits_eos_inf=True, confidence_eos_eot_inf=True)
        assert case.ours(eos_last=True, min_tokens=ANSWER, ignore_eos=False) == wanted


def test_requests_without_the_option_are_as_they_were_beside_one_with_it(cases: list[Case]) -> None:
    case = cases[-1]
    prompts = [prompt for prompt, _ in case.asked]
    knobs: list[dict[str, Any]] = [
        {"remasking": "low_confidence", "block_length": block, "steps": steps}
        for _, (block, steps) in case.asked
    ]
    knobs[1] |= {"eos_last": True}
    outputs, _ = run(make_engine(case.folder, max_rows=5), prompts, ANSWER, knobs)
    plain, last = case.wanted(), case.wanted(confidence_eos_eot_inf=True)
    assert outputs == [plain[0], last[1], *plain[2:]]


def test_control_ends_that_are_held_back_but_counted_are_another_rule(
    cases: list[Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `eos_last` did before: positions whose choice is an end wait, and the others' measures
    are those of all ids."""
    choose = sampler.choose_with_confidence

    def counted(batch: Any, draws: torch.Tensor, held: Any = None) -> Any:
        return choose(batch, draws)

    monkeypatch.setattr(reveal, "choose_with_confidence", counted)
    assert any(
        case.ours(eos_last=True) != case.wanted(confidence_eos_eot_inf=True) for case in cases
    )


def test_control_suppressed_ends_that_are_counted_are_another_rule(
    cases: list[Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `min_tokens` did before."""

    @contextmanager
    def counted(batch: Any, held: Any) -> Iterator[torch.Tensor]:
        yield batch.logits_NV

    monkeypatch.setattr(sampler, "left_out", counted)
    assert any(
        case.ours(min_tokens=ANSWER, ignore_eos=False) != case.wanted(logits_eos_inf=True)
        for case in cases
    )


def test_control_an_eot_that_nobody_knows_is_another_rule(cases: list[Case]) -> None:
    def differs(case: Case) -> bool:
        path = case.folder / "tokenizer.json"
        names = path.read_text()
        path.write_text("{}")
        case.engine = make_engine(case.folder)
        path.write_text(names)
        found = case.ours(eos_last=True)
        del case.engine
        return found != case.wanted(confidence_eos_eot_inf=True)

    assert any(map(differs, cases))

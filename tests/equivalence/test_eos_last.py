"""`eos_last` against a slow loop: what ends an answer falls when nothing else is left."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from engine_service.decoding.block_diffusion import BlockDiffusion
from tests.equivalence.harness import BLOCK, Setup, ToyEngine
from tests.equivalence.references import random_prompt
from tests.fakes import MASK, ToyModel
from tidemill.runtime.errors import InvalidRequest

SIZE = 6
ENDS = tuple(range(0, 40, 3))
"""A third of the vocabulary, so that they are chosen often."""


def fill(
    model: ToyModel, prompt: list[int], count: int, threshold: float, *, last: bool
) -> list[int]:
    """Block diffusion by threshold; with `last` what ends the answer does not count in how sure a
    choice is, and a choice of it is the least sure one."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < count:
        hidden = list(range(len(tokens), (len(tokens) // SIZE + 1) * SIZE))
        tokens += [MASK] * len(hidden)
        while hidden:
            logits = model.dense(tokens, SIZE)
            logits[:, MASK] = -torch.inf
            best = {p: int(logits[p].argmax()) for p in hidden}
            if last:
                logits[:, ENDS] = -torch.inf
            sure = {p: float(logits[p].softmax(-1)[best[p]]) for p in hidden}
            sure = {p: -1.0 if last and best[p] in ENDS else s for p, s in sure.items()}
            taken = [p for p in hidden if sure[p] >= threshold]
            for p in taken or [max(hidden, key=lambda p: (sure[p], -p))]:
                tokens[p] = best[p]
                hidden.remove(p)
    return tokens[len(prompt) : len(prompt) + count]


def test_ends_fall_last() -> None:
    num_changed = 0
    for seed in range(8):
        rng, model = random.Random(seed), ToyModel(seed)
        strategy = BlockDiffusion(block=SIZE, mask_token_id=MASK, eos_token_ids=ENDS)
        setup = Setup(block=SIZE, page_size=6)
        engine = ToyEngine(model, setup, strategies={BLOCK: strategy}, default_method=BLOCK)
        asked = {}
        for last in (True, True, False):
            prompt, threshold = random_prompt(rng, 1, 9), rng.choice([0.0, 0.5, 1.5])
            knobs = {"threshold": threshold, "eos_last": last}
            asked[engine.submit(prompt, 18, BLOCK, knobs)] = (prompt, threshold, last)
        while engine.scheduler.has_work:
            engine.step()
            if rng.random() < 0.2:
                engine.preempt(rng.choice(list(asked)))
        for key, (prompt, threshold, last) in asked.items():
            tokens = engine.results[key].tokens
            assert tokens == fill(model, prompt, 18, threshold, last=last)
            num_changed += last and tokens != fill(model, prompt, 18, threshold, last=False)
    assert num_changed > 4, "the control: it makes a difference"


CAREFUL: dict[str, dict[str, Any]] = {
    "factor": {"factor": 0.0},
    "entropy_bound": {"entropy_bound": 0.0},
    "low_confidence": {"steps": SIZE},
    "hierarchical": {"threshold": 1.5, "low_threshold": 1.5},
}
"""Knobs with which a rule reveals one position a step."""


def next_to_fall(logits: torch.Tensor, best: dict[int, int], rule: str) -> int:
    """The surest position that does not end the answer, or the first one where all do; how sure is
    asked of what does not end it."""
    others = [p for p in best if best[p] not in ENDS]
    without = logits.clone()
    without[:, ENDS] = -torch.inf
    probs = {p: without[p].softmax(-1) for p in others}
    if rule == "entropy_bound":
        entropy = {p: -float((q * q.log()).nansum()) for p, q in probs.items()}
        return min(others, key=lambda p: (entropy[p], p), default=min(best))
    return min(others, key=lambda p: (-float(probs[p][best[p]]), p), default=min(best))


@pytest.mark.parametrize("rule", CAREFUL)
def test_every_rule_by_sureness_keeps_ends_back(rule: str) -> None:
    num_kept = 0
    for seed in range(6):
        model, prompt = ToyModel(seed), list(range(1, SIZE + 1))
        strategy = BlockDiffusion(block=SIZE, mask_token_id=MASK, eos_token_ids=ENDS)
        setup = Setup(block=SIZE, page_size=6)
        engine = ToyEngine(model, setup, strategies={BLOCK: strategy}, default_method=BLOCK)
        knobs = {"remasking": rule, "eos_last": True, **CAREFUL[rule]}
        key = engine.submit(prompt, SIZE, BLOCK, knobs)
        engine.run()
        tokens, hidden = prompt + [MASK] * SIZE, list(range(SIZE, 2 * SIZE))
        while hidden:
            logits = model.dense(tokens, SIZE)
            logits[:, MASK] = -torch.inf
            best = {p: int(logits[p].argmax()) for p in hidden}
            num_ends = sum(token in ENDS for token in best.values())
            num_kept += 0 < num_ends < len(hidden)
            place = next_to_fall(logits, best, rule)
            tokens[place] = best[place]
            hidden.remove(place)
        assert engine.results[key].tokens == tokens[SIZE:]
    assert num_kept > 0, "the control: there was something to keep back"


def test_it_is_a_flag() -> None:
    with pytest.raises(InvalidRequest, match="true or false") as refused:
        BlockDiffusion(block=4, mask_token_id=MASK).parse({"eos_last": 1})
    assert refused.value.param == "decoding.params.eos_last"

"""Block diffusion against SDAR's own loop, where its published form is well defined."""

from __future__ import annotations

import random

import pytest

from tests.equivalence.harness import BLOCK, Setup, ToyEngine
from tests.equivalence.oracles_dense import DenseToy
from tests.equivalence.oracles_sdar import sdar_generate
from tests.equivalence.references import random_prompt
from tests.fakes import MASK, ToyModel

SIZE = 4


@pytest.mark.parametrize(
    "strategy", ["low_confidence_static", "low_confidence_dynamic", "sequential"]
)
def test_blocks_fall_as_in_sdar(strategy: str) -> None:
    """Whole blocks of prompt and one step per position: with fewer steps, or masks left over from
    the prompt, the published loop overwrites tokens that stand."""
    by_threshold = set()
    for seed in range(4):
        rng, model = random.Random(seed), ToyModel(seed)
        engine, asked = ToyEngine(model, Setup(block=SIZE)), {}
        for _ in range(4):
            prompt = random_prompt(rng, SIZE, SIZE) + random_prompt(rng, SIZE, SIZE)
            threshold = rng.choice([0.2, 0.5, 0.85])
            knobs = {"remasking": strategy, "steps": SIZE}
            if strategy == "low_confidence_dynamic":
                knobs["threshold"] = threshold
            asked[engine.submit(prompt, 16, BLOCK, knobs)] = (prompt, threshold)
        engine.run()
        for key, (prompt, threshold) in asked.items():
            wanted = sdar_generate(
                DenseToy(model).block_logits(SIZE),
                prompt,
                mask_id=MASK,
                gen_length=16,
                block_length=SIZE,
                denoising_steps=SIZE,
                strategy=strategy,
                threshold=threshold,
            )
            assert engine.results[key].tokens == wanted.tokens
            by_threshold.add(wanted.nfe)
    assert (len(by_threshold) > 1) == (strategy == "low_confidence_dynamic")

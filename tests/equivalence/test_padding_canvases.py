"""Steps of canvases, of blocks and of whole ones, that are padded to the sizes of captured steps
decide what they decide unpadded, without a GPU."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine_service.kernels.key_scores import KeepingSpans
from engine_service.worker.buckets import list_canvas_buckets, list_whole_canvases
from engine_service.worker.layout import StepLayout
from tests.equivalence.test_padding import FIXED, ROWS, PaddedSteps, Spoil, interpreted, make_llm
from tests.equivalence.test_worker_canvas import write_llada
from tests.models.checkpoints import SIZES
from tidemill.llm import LLM
from tidemill.sampling_params import SamplingParams

HOLE = 8
CANVASES = [
    {"cache": "dual"},
    {"cache": "sparse", "retention_ratio": 0.5, "head_select": True, "threshold": 2.0},
    {"cache": "prefix"},
    {},
]
BOTH = [{"cache": "sparse", "retention_ratio": 0.5, "threshold": 2.0}, {"cache": "dual"}, {}]
"""Aside of the pages and over them."""


def canvas_tokens(
    llm: LLM, seed: int, shift: int = 0, caches: list[dict] = CANVASES, count: int = 4
) -> list[list[int]]:
    """A row of every cache at a time, `shift` of them turned."""
    draw, vocab = random.Random(seed), SIZES["vocab_size"] - 1
    prompts = [[draw.randrange(vocab) for _ in range(length)] for length in (5, 11, 2, 7)[:count]]
    params = [
        SamplingParams(
            temperature=0.0,
            max_tokens=2 * HOLE,
            ignore_eos=True,
            method_params={
                "block_length": HOLE,
                "threshold": 0.6,
                **caches[(n + shift) % len(caches)],
            },
        )
        for n in range(len(prompts))
    ]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@interpreted
def test_blocks_of_canvases(tmp_path: Path, seed: int) -> None:
    """Their tokens stand behind kept keys, in other slots than their positions."""
    write_llada(tmp_path, 7)
    want = canvas_tokens(make_llm(tmp_path, "sdpa"), seed)
    llm = make_llm(tmp_path, "triton")
    runner = llm.engine.executor._runner
    buckets = list_canvas_buckets(
        max_rows=ROWS, hole=HOLE, max_decide=HOLE, token_budget=256, logit_limit=256
    )
    seen: list[StepLayout] = []
    watch: Spoil = lambda padded, real: seen.append(real) or padded  # noqa: E731
    runner._graphs = PaddedSteps(runner._program, buckets, watch)
    assert canvas_tokens(llm, seed) == want
    assert any(layout.slot_positions is not None for layout in seen)
    seen.clear()
    dual = [{"cache": "dual", "threshold": 2.0}]
    want = canvas_tokens(make_llm(tmp_path, "sdpa"), seed, caches=dual, count=1)
    assert canvas_tokens(llm, seed, caches=dual, count=1) == want
    assert any(layout.slot_positions is None for layout in seen)


WHOLE = [
    {},
    {"cfg_scale": 1.5},
    {"cache": "dual", "refresh_interval": 2},
    {"cache": "prefix"},
    {"cache": "sparse", "retention_ratio": 0.5, "refresh_interval": 2},
    {"cache": "sparse", "retention_ratio": 0.3, "delay_step": 0, "head_select": True},
]


def whole_canvas_tokens(llm: LLM, seed: int, kinds: list[dict]) -> list[list[list[int]]]:
    """Two requests of a kind at a time: canvases of two lengths, and nothing beside them."""
    draw, vocab = random.Random(seed), SIZES["vocab_size"] - 1
    made = []
    for kind in kinds:
        prompts = [[draw.randrange(vocab) for _ in range(length)] for length in (5, 17)]
        params = SamplingParams(
            temperature=0.0,
            max_tokens=12,
            ignore_eos=True,
            method_params={"remasking": "low_confidence", "block_length": 6, "steps": 6, **kind},
        )
        outputs = llm.generate(prompts, params, use_tqdm=False)
        made.append([output.outputs[0].token_ids for output in outputs])
    return made


def pad_canvas_steps(llm: LLM, spoil: Spoil | None = None) -> PaddedSteps:
    runner = llm.engine.executor._runner
    buckets = list_whole_canvases(max_rows=ROWS, longest=64, token_budget=256)
    runner._graphs = PaddedSteps(runner._program, buckets, spoil)
    return runner._graphs


@interpreted
def test_whole_canvases(tmp_path: Path, seed: int) -> None:
    """Aside of the pages and over them, keeping keys and not, one copy and two."""
    write_llada(tmp_path, 7)
    want = whole_canvas_tokens(make_llm(tmp_path, "sdpa"), seed, WHOLE)
    llm = make_llm(tmp_path, "triton")
    steps = pad_canvas_steps(llm)
    assert whole_canvas_tokens(llm, seed, WHOLE) == want
    assert {bucket.aside for bucket in steps.ran} == {False, True}
    assert {bucket.tokens for bucket in steps.ran} >= {64, 128}


@interpreted
def test_canvases_aside_of_the_pages_beside_others(tmp_path: Path, seed: int) -> None:
    """A step of both sorts runs as two, one after the other; nothing is left to be launched."""
    write_llada(tmp_path, 7)
    want = canvas_tokens(make_llm(tmp_path, "sdpa"), seed, caches=BOTH, count=3)
    llm = make_llm(tmp_path, "triton")
    steps = pad_canvas_steps(llm)
    steps._buckets += list_canvas_buckets(
        max_rows=ROWS, hole=HOLE, max_decide=HOLE, token_budget=256, logit_limit=256
    )
    launched: list[StepLayout] = []
    forward = steps.forward

    def watched(layout: StepLayout) -> torch.Tensor | None:
        hidden = forward(layout)
        launched.extend([layout] if hidden is None else [])
        return hidden

    steps.forward = watched
    assert canvas_tokens(llm, seed, caches=BOTH, count=3) == want
    assert not launched
    assert {bucket.aside for bucket in steps.ran} == {False, True}
    assert any(bucket.decided for bucket in steps.ran)


def test_control_other_kinds_give_other_tokens(tmp_path: Path) -> None:
    """Of the three tests above: who got what was another's would be seen."""
    write_llada(tmp_path, 7)
    llm = make_llm(tmp_path, "sdpa")
    for caches, count in ((CANVASES, 4), (BOTH, 3)):
        want = canvas_tokens(llm, FIXED, caches=caches, count=count)
        assert canvas_tokens(llm, FIXED, shift=1, caches=caches, count=count) != want
    turned = WHOLE[1:] + WHOLE[:1]
    assert whole_canvas_tokens(llm, FIXED, turned) != whole_canvas_tokens(llm, FIXED, WHOLE)


def into_a_real_canvas(padded: StepLayout, real: StepLayout) -> StepLayout:
    """Padding aside of the pages stores over the first canvas."""
    assert padded.aside is not None
    assert real.aside is not None
    slots = padded.aside.slots.copy()
    slots[len(real.aside.slots) :] = real.aside.slots[0]
    return replace(padded, aside=replace(padded.aside, slots=slots))


def over_kept_keys(padded: StepLayout, real: StepLayout) -> StepLayout:
    """Padding spans keep one key, of what padding stores, in the pages where the first span keeps
    more."""
    if padded.aside is None or real.aside is None or real.aside.kept is None:
        return padded
    assert padded.aside.kept is not None
    kept = KeepingSpans(*(array.copy() for array in padded.aside.kept.arrays))
    num_real = len(real.aside.kept.arrays[0])
    for column in kept:
        column[num_real:] = column[0]
    kept.num_kept[num_real:] = 1
    kept.first_slot[num_real:] = 0
    layout = padded.aside.kept._replace(arrays=tuple(kept))
    return replace(padded, aside=replace(padded.aside, kept=layout))


@interpreted
@pytest.mark.parametrize(
    ("spoil", "kind"),
    [(into_a_real_canvas, WHOLE[0]), (over_kept_keys, WHOLE[4])],
    ids=["slots", "kept"],
)
def test_control_padding_that_touches_a_real_canvas_shows(
    spoil: Spoil, kind: dict, tmp_path: Path
) -> None:
    write_llada(tmp_path, 7)
    want = whole_canvas_tokens(make_llm(tmp_path, "sdpa"), FIXED, [kind])
    llm = make_llm(tmp_path, "triton")
    steps = pad_canvas_steps(llm, spoil)
    steps._buckets = [bucket for bucket in steps._buckets if bucket.tokens == 128]
    assert whole_canvas_tokens(llm, FIXED, [kind]) != want

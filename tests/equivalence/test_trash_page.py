"""Nobody reads the page that padding stores into: full of NaN, it changes no token and no score."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_service.worker.buckets import Bucket, list_canvas_buckets
from engine_service.worker.layout import StepLayout
from tests.equivalence.test_padding import (
    BLOCK,
    FIXED,
    MASK,
    MIXED,
    ROWS,
    PaddedSteps,
    Spoil,
    folders,
    interpreted,
    make_llm,
    pad_steps,
    tokens,
)
from tests.equivalence.test_padding_canvases import (
    BOTH,
    HOLE,
    WHOLE,
    canvas_tokens,
    pad_canvas_steps,
    whole_canvas_tokens,
)
from tests.equivalence.test_worker_canvas import write_llada
from tidemill.llm import LLM
from tidemill.outputs import Logprob
from tidemill.sampling_params import SamplingParams

__all__ = ["folders"]
COUNT = 6
"""Tokens of a request: the prompts of 5 and 3 begin a second page with fewer."""
Scored = list[tuple[list[int], list[dict[int, Logprob]] | None]]


def scored(llm: LLM, seed: int, *, count: int) -> Scored:
    """Tokens and log-probabilities of one request more than there are rows."""
    draw = random.Random(seed)
    prompts = [[draw.randrange(MASK) for _ in range(length)] for length in (5, 1, 12, 3)]
    params = [
        SamplingParams(max_tokens=count, seed=number, ignore_eos=True, logprobs=1, **kind)
        for number, kind in enumerate([*MIXED, MIXED[0]])
    ]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]


def program_of(llm: LLM) -> Any:
    return llm.engine.executor._runner._program


def poison(llm: LLM, page: int) -> None:
    for cache in program_of(llm).caches:
        cache.k[page] = torch.nan
        cache.v[page] = torch.nan


def poisoned_trash(llm: LLM, num_padded: list[int]) -> Spoil:
    """Fills the trash page before every step, and counts the tokens that are stored into it."""
    tables = program_of(llm).tables
    poison(llm, tables.pages.trash_page)

    def spoil(padded: StepLayout, real: StepLayout) -> StepLayout:
        poison(llm, tables.pages.trash_page)
        num_padded.append(int((padded.slots == tables.trash_slot).sum()))
        return padded

    return spoil


def poisoned_first_page(llm: LLM) -> Spoil:
    """Fills the page of a row that is running, which the step does not begin."""

    def spoil(padded: StepLayout, real: StepLayout) -> StepLayout:
        if real.positions[0] % 8:
            poison(llm, int(real.slots[0]) // 8)
        return padded

    return spoil


@pytest.mark.parametrize("backend", ["sdpa", pytest.param("triton", marks=interpreted)])
def test_decoding_rows(folders: dict[str, Path], backend: str, seed: int) -> None:
    """Number for number what steps padded alike give over a clean page."""
    llm, num_padded, made = make_llm(folders["causal"], backend), list[int](), list[Scored]()
    for is_poisoned in (False, True):
        spoil = poisoned_trash(llm, num_padded) if is_poisoned else None
        steps = pad_steps(llm, block=1, spoil=spoil)
        steps._buckets = [Bucket(8, 8, 1, 8)]
        made.append(scored(llm, seed, count=COUNT))
    assert made[0] == made[1]
    assert len(num_padded) > COUNT
    assert min(num_padded) >= 8 - ROWS


@pytest.mark.parametrize("backend", ["sdpa", pytest.param("triton", marks=interpreted)])
@pytest.mark.parametrize("name", ["causal", "block"])
def test_unpadded_rows(folders: dict[str, Path], name: str, backend: str, seed: int) -> None:
    """The pages that short rows lack beside long ones are the trash page too."""
    llm = make_llm(folders[name], backend)
    want = scored(llm, seed, count=COUNT)
    trash = program_of(llm).tables.pages.trash_page
    poison(llm, trash)
    assert scored(llm, seed, count=COUNT) == want
    assert all(cache.v[trash].isnan().all() for cache in program_of(llm).caches)


@interpreted
@pytest.mark.parametrize(("name", "block"), [("causal", 1), ("block", BLOCK)])
def test_ragged_spans(folders: dict[str, Path], name: str, block: int, seed: int) -> None:
    want = tokens(make_llm(folders[name], "sdpa"), seed, count=6, kinds=MIXED)
    llm, num_padded = make_llm(folders[name], "triton"), list[int]()
    pad_steps(llm, block=block, spoil=poisoned_trash(llm, num_padded))
    assert tokens(llm, seed, count=6, kinds=MIXED) == want
    assert sum(num_padded) > 0


@interpreted
def test_canvases(tmp_path: Path, seed: int) -> None:
    """Blocks over the pages, and whole canvases that keep keys in them."""
    write_llada(tmp_path, 7)
    plain = make_llm(tmp_path, "sdpa")
    want = canvas_tokens(plain, seed, caches=BOTH, count=3)
    whole = whole_canvas_tokens(plain, seed, WHOLE[2:5])
    llm, num_padded = make_llm(tmp_path, "triton"), list[int]()
    steps: PaddedSteps = pad_canvas_steps(llm, poisoned_trash(llm, num_padded))
    steps._buckets += list_canvas_buckets(
        max_rows=ROWS, hole=HOLE, max_decide=HOLE, token_budget=256, logit_limit=256
    )
    assert canvas_tokens(llm, seed, caches=BOTH, count=3) == want
    assert whole_canvas_tokens(llm, seed, WHOLE[2:5]) == whole
    assert sum(num_padded) > 0


@pytest.mark.parametrize("backend", ["sdpa", pytest.param("triton", marks=interpreted)])
def test_control_a_poisoned_page_of_a_live_row_shows(
    folders: dict[str, Path], backend: str
) -> None:
    """What is wrong here is what others must not read there."""
    llm, made = make_llm(folders["causal"], backend), list[list[list[int]]]()
    for is_poisoned in (False, True):
        spoil = poisoned_first_page(llm) if is_poisoned else None
        steps = pad_steps(llm, block=1, spoil=spoil)
        steps._buckets = [Bucket(8, 8, 1, 8)]
        made.append(tokens(llm, FIXED, count=COUNT, kinds=MIXED))
    assert made[0] != made[1]

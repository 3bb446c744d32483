"""Steps padded to the sizes of captured ones decide what they decide unpadded, without a GPU.

What a CUDA graph replays runs here eagerly over the same padded arrays; attention by Triton's
kernels, interpreted, where spans are ragged.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from engine_service.attention.base import AttentionBackend
from engine_service.kernels.jit import HAS_TRITON, INTERPRETED
from engine_service.launching import LAUNCH_BOUND
from engine_service.sampling.batch import DecideResult, Wants
from engine_service.staging import stage
from engine_service.worker.batch import bind_batch, columns_of
from engine_service.worker.buckets import (
    FILTERED,
    PLAIN,
    Bucket,
    captured_choice,
    find_bucket,
    find_forward_bucket,
    list_buckets,
    list_prompts,
)
from engine_service.worker.layout import StepLayout
from engine_service.worker.padding import pad, pad_forward, padding_forward
from engine_service.worker.program import StepProgram
from tests.equivalence.shapes import SHAPES
from tests.models.checkpoints import SIZES, Case, write
from tidemill.llm import LLM
from tidemill.sampling_params import SamplingParams

interpreted = pytest.mark.skipif(
    not (HAS_TRITON and INTERPRETED), reason="needs Triton's interpreter"
)
BLOCK, MASK = 4, 319
ROWS = 3
FIXED = 1
"""What controls draw by: what is wrong can give the right tokens for one seed in many."""
Spoil = Callable[[StepLayout, StepLayout], StepLayout]
"""(padded, real) to a step that is padded wrongly."""


def as_block_model(config: dict) -> None:
    config |= {
        "architectures": ["SDARForCausalLM"],
        "model_type": "sdar",
        "block_size": BLOCK,
        "mask_token_id": MASK,
    }


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two layers, one of them with a sliding window; the same sizes as a block-diffusion model; and
    one whose tokens choose experts with their block."""
    made = {}
    windowed = {
        "use_sliding_window": True,
        "sliding_window": 9,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    for name, edit, more in (("causal", None, windowed), ("block", as_block_model, {})):
        made[name] = tmp_path_factory.mktemp(name)
        options = {"head_dim": 16, "num_hidden_layers": 2, **more}
        write(Case(name=name, kind="Qwen3", options=options, edit=edit), made[name], seed=5)
    made["routed"] = tmp_path_factory.mktemp("routed")
    routed = SHAPES["llada2-moe"].config | {"expert_capacity": 4, "block_size": BLOCK}
    (made["routed"] / "config.json").write_text(json.dumps(routed))
    return made


@contextmanager
def nan_behind(backend: AttentionBackend, num_tokens: int) -> Iterator[None]:
    """Attention leaves nobody's rows as they lay in memory, which differs between runs: NaN here,
    which whoever reads them cannot miss."""
    attend = backend.attend

    def attended(q_THD: torch.Tensor, **rest: Any) -> torch.Tensor:
        out = attend(q_THD, **rest)
        out[num_tokens:] = torch.nan
        return out

    with patch.object(backend, "attend", attended):
        yield


class PaddedSteps:
    """Stands where the runner has its CUDA graphs: pads like them and computes at once."""

    def __init__(self, program: StepProgram, buckets: list[Bucket], spoil: Spoil | None) -> None:
        self.ran: list[Bucket] = []
        """The bucket of every step that found one."""
        self.choices: list[Wants | None] = []
        """What those that decide decide for, as graphs of their own would; None: behind one."""
        self._program, self._buckets, self._spoil = program, buckets, spoil
        program.tables.pages.tells_late = True  # as those of a GPU, which alone has graphs

    def run(self, layout: StepLayout) -> DecideResult | None:
        bucket = find_bucket(layout, self._buckets)
        if bucket is None:
            return None
        self.ran.append(bucket)
        program = self._program
        padded = pad(layout, bucket, program.tables)
        (part,) = padded.decides
        choice = captured_choice(part.wants, (PLAIN, FILTERED))
        self.choices.append(choice)
        if choice is not None:
            padded = replace(padded, decides=(replace(part, wants=choice),))
        if self._spoil is not None:
            padded = self._spoil(padded, layout)
        staged = stage(columns_of(padded), program.tables.device)
        batch = bind_batch(padded, staged, program.tables)
        (bound,) = batch.decides
        with nan_behind(program.backend, len(layout.places)):
            states = program.states(batch)
        return program.decide(bound, program.logits(bound, states))

    def has_room(self, layout: StepLayout) -> bool:
        return (find_bucket(layout, self._buckets) or self._find_forward(layout)) is not None

    def forward(self, layout: StepLayout) -> torch.Tensor | None:
        bucket = self._find_forward(layout)
        if bucket is None:
            return None
        self.ran.append(bucket)
        program = self._program
        padded = pad_forward(layout, bucket, program.tables)
        if self._spoil is not None:
            padded = self._spoil(padded, layout)
        columns = columns_of(padded)
        # What a graph was captured with lies where these are put.
        captured = columns_of(padding_forward(bucket, program.tables))
        assert [(x.shape, x.dtype) for x in columns] == [(x.shape, x.dtype) for x in captured]
        batch = bind_batch(padded, stage(columns, program.tables.device), program.tables)
        with nan_behind(program.backend, len(layout.places)):
            return program.forward(batch)[: len(layout.places)]

    def _find_forward(self, layout: StepLayout) -> Bucket | None:
        return find_forward_bucket(layout, self._buckets, LAUNCH_BOUND)


def make_llm(folder: Path, backend: str) -> LLM:
    has_weights = any(folder.glob("*.safetensors"))
    return LLM(
        str(folder),
        load_format="auto" if has_weights else "dummy",
        device="cpu",
        dtype="float32",
        attention_backend=backend,
        max_rows=ROWS,
        max_model_len=64,
        page_size=8,
        prefix_caching=False,
        skip_tokenizer_init=True,
    )


def pad_steps(llm: LLM, *, block: int, spoil: Spoil | None = None) -> PaddedSteps:
    runner = llm.engine.executor._runner
    buckets = list_buckets(
        max_rows=ROWS, block=block, max_decide=block, token_budget=256, logit_limit=256
    )
    buckets += list_prompts(max_rows=ROWS, most_tokens=256)
    runner._graphs = PaddedSteps(runner._program, buckets, spoil)
    return runner._graphs


def tokens(llm: LLM, seed: int, *, count: int, kinds: list[dict]) -> list[list[int]]:
    """Of one request more than there are rows, so that a row is taken twice."""
    draw = random.Random(seed)
    vocab = SIZES["vocab_size"] - 1
    prompts = [
        [draw.randrange(vocab) for _ in range(length)] for length in (5, 1, 12, 3)[: ROWS + 1]
    ]
    params = [
        SamplingParams(max_tokens=count, seed=number, ignore_eos=True, **kinds[number % len(kinds)])
        for number in range(len(prompts))
    ]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


GREEDY = [{"temperature": 0.0}]
MIXED = [{"temperature": 0.0}, {"temperature": 5.0}, {"temperature": 5.0, "top_k": 20}]
FILTERS = [
    {"temperature": 5.0, "top_k": 3},
    {"temperature": 5.0, "top_p": 0.2},
    {"temperature": 5.0, "min_p": 0.5},
    {"temperature": 5.0, "top_k": 40, "top_p": 0.5, "min_p": 0.1},
]
"""Each drops most of what would be drawn."""
BEYOND = [{"temperature": 5.0, "top_k": 3, "presence_penalty": 1.0}]
"""What no graph decides."""


@pytest.mark.parametrize(
    "kinds", [GREEDY, MIXED, FILTERS, BEYOND], ids=["greedy", "mixed", "filters", "beyond"]
)
def test_decoding_rows(folders: dict[str, Path], kinds: list[dict], seed: int) -> None:
    """One query a row; prompts are ragged and run unpadded, as this library does not capture."""
    want = tokens(make_llm(folders["causal"], "sdpa"), seed, count=20, kinds=kinds)
    llm = make_llm(folders["causal"], "sdpa")
    steps = pad_steps(llm, block=1)
    steps._buckets = [bucket for bucket in steps._buckets if bucket.longest == 1]
    assert tokens(llm, seed, count=20, kinds=kinds) == want
    assert {bucket.rows for bucket in steps.ran} >= {1, ROWS}


@pytest.mark.parametrize(
    ("kinds", "choices"),
    [
        (GREEDY, {PLAIN}),
        (FILTERS, {FILTERED}),
        ([*GREEDY, *FILTERS[:1]], {FILTERED}),
        (BEYOND, {None}),
    ],
    ids=["greedy", "filters", "both", "beyond"],
)
def test_which_graph_decides(
    folders: dict[str, Path], kinds: list[dict], choices: set[Wants | None]
) -> None:
    """One filtered row takes the plain ones of its step with it."""
    llm = make_llm(folders["causal"], "sdpa")
    steps = pad_steps(llm, block=1)
    steps._buckets = [bucket for bucket in steps._buckets if bucket.longest == 1]
    tokens(llm, FIXED, count=6, kinds=kinds)
    assert set(steps.choices) == choices


@interpreted
@pytest.mark.parametrize(("name", "block"), [("causal", 1), ("block", BLOCK), ("routed", BLOCK)])
def test_ragged_spans(folders: dict[str, Path], name: str, block: int, seed: int) -> None:
    """Prompts beside decoding rows or blocks, and blocks beside stored ones, by the captured
    library."""
    want = tokens(make_llm(folders[name], "sdpa"), seed, count=6, kinds=MIXED)
    llm = make_llm(folders[name], "triton")
    steps = pad_steps(llm, block=block)
    assert tokens(llm, seed, count=6, kinds=MIXED) == want
    assert any(bucket.longest > 1 for bucket in steps.ran)
    assert block > 1 or any(bucket.longest == 1 for bucket in steps.ran)
    assert block == 1 or any(bucket.longest > 2 * block for bucket in steps.ran), "of prompts"


@interpreted
def test_what_is_scored_and_pooled(folders: dict[str, Path], seed: int) -> None:
    """Behind prompts that are padded, by whoever follows them."""
    draw = random.Random(seed)
    prompts = [[draw.randrange(MASK) for _ in range(length)] for length in (40, 3, 17, 9)]
    params = SamplingParams(max_tokens=2, temperature=0.0, prompt_logprobs=0)

    def measure(llm: LLM) -> np.ndarray:
        scored = [one.prompt_logprobs for one in llm.generate(prompts, params, use_tqdm=False)]
        scores = [
            place[token].logprob
            for places, prompt in zip(scored, prompts, strict=True)
            for place, token in zip(places[1:], prompt[1:], strict=True)
        ]
        vectors = [one.embedding for one in llm.embed(prompts)]
        return np.concatenate([np.array(scores), *map(np.array, vectors)])

    want = measure(make_llm(folders["causal"], "sdpa"))
    llm = make_llm(folders["causal"], "triton")
    steps = pad_steps(llm, block=1)
    np.testing.assert_allclose(measure(llm), want, atol=1e-4)
    assert sum(not bucket.decided for bucket in steps.ran) >= 2, "steps that score, and that pool"


@interpreted
@pytest.mark.parametrize("name", ["causal", "block"])
def test_triton_gives_the_tokens_of_sdpa(folders: dict[str, Path], name: str, seed: int) -> None:
    want = tokens(make_llm(folders[name], "sdpa"), seed, count=4, kinds=MIXED)
    assert tokens(make_llm(folders[name], "triton"), seed, count=4, kinds=MIXED) == want


@interpreted
def test_control_another_scale_gives_other_tokens(folders: dict[str, Path]) -> None:
    want = tokens(make_llm(folders["causal"], "sdpa"), FIXED, count=4, kinds=MIXED)
    llm = make_llm(folders["causal"], "triton")
    backend = llm.engine.executor._runner._program.backend
    attend = backend.attend
    backend.attend = lambda q, *, scale, **rest: attend(q, scale=2 * scale, **rest)
    assert tokens(llm, FIXED, count=4, kinds=MIXED) != want


def into_a_real_page(padded: StepLayout, real: StepLayout) -> StepLayout:
    """Padding stores over the first key of the first row's page."""
    slots = padded.slots.copy()
    slots[len(real.slots) :] = real.slots[0] // 8 * 8
    return replace(padded, slots=slots)


def into_a_real_row(padded: StepLayout, real: StepLayout) -> StepLayout:
    """Padding decides where the first row decides."""
    (part,), (own,) = padded.decides, real.decides
    columns = {}
    for name in ("rows", "positions"):
        column: np.ndarray = getattr(part, name).copy()
        column[len(own.rows) :] = getattr(own, name)[0]
        columns[name] = column
    queries = part.queries.copy()
    queries[len(own.rows) :] = len(real.places)
    return replace(padded, decides=(replace(part, queries=queries, **columns),))


def without_late_pages(padded: StepLayout, real: StepLayout) -> StepLayout:
    """The device does not learn what rows have got since they came."""
    assert padded.late is not None
    return replace(padded, late=padded.late._replace(entries=np.full_like(padded.late.entries, -1)))


def without_filters(padded: StepLayout, real: StepLayout) -> StepLayout:
    """By the graph of rows that have none."""
    (part,) = padded.decides
    return replace(padded, decides=(replace(part, wants=PLAIN),))


@pytest.mark.parametrize("kind", FILTERS, ids=str)
def test_control_filtered_rows_by_the_graph_of_plain_ones(
    folders: dict[str, Path], kind: dict
) -> None:
    want = tokens(make_llm(folders["causal"], "sdpa"), FIXED, count=20, kinds=[kind])
    llm = make_llm(folders["causal"], "sdpa")
    pad_steps(llm, block=1, spoil=without_filters)._buckets = [Bucket(8, 8, 1, 8)]
    assert tokens(llm, FIXED, count=20, kinds=[kind]) != want


@pytest.mark.parametrize("spoil", [into_a_real_page, into_a_real_row, without_late_pages])
def test_control_steps_that_are_padded_wrongly_show(folders: dict[str, Path], spoil: Spoil) -> None:
    want = tokens(make_llm(folders["causal"], "sdpa"), FIXED, count=20, kinds=GREEDY)
    llm = make_llm(folders["causal"], "sdpa")
    steps = pad_steps(llm, block=1, spoil=spoil)
    steps._buckets = [Bucket(8, 8, 1, 8)]
    assert tokens(llm, FIXED, count=20, kinds=GREEDY) != want

"""Graphs of a pipeline's stages give the tokens of all layers in one, without a GPU.

What a CUDA graph would replay is computed anew at every replay, on the tensors it was captured
with; what the stages send each other lies in a queue.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine_service.core.step import Span
from engine_service.distributed import Group
from engine_service.stages import Stage
from engine_service.worker.buckets import Bucket, buckets_of
from engine_service.worker.graphs import StepGraphs
from engine_service.worker.layout import StepLayout, lay_out
from engine_service.worker.program import StepProgram
from engine_service.worker.weights import load_model
from tests.equivalence.replays import replay_on_a_cpu
from tests.equivalence.test_padding import (
    BLOCK,
    MIXED,
    as_block_model,
    interpreted,
    make_llm,
    tokens,
)
from tests.equivalence.test_padding_canvases import (
    BOTH,
    WHOLE,
    canvas_tokens,
    whole_canvas_tokens,
)
from tests.equivalence.test_worker_canvas import write_llada
from tests.models.checkpoints import Case, write
from tidemill.llm import LLM

pytestmark = interpreted
NUM_STAGES = 2
MOST_TOKENS = 64
"""Of a step that is captured here: interpreted kernels take long for more, and the prompts of
`tokens` have 21 together."""
GUIDED = 128
"""Of two guided canvases, each computed twice."""


class Queue:
    """Stands where a stage has its links."""

    def __init__(self) -> None:
        self.sent: deque[torch.Tensor] = deque()

    def pass_on(self, hidden: torch.Tensor) -> None:
        self.sent.append(hidden)

    def receive(self, into: torch.Tensor) -> None:
        into.copy_(self.sent.popleft())


@pytest.fixture(autouse=True)
def replays_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    replay_on_a_cpu(monkeypatch)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Three layers: two of the first stage, one of the last."""
    made = {}
    for name, edit in (("causal", None), ("block", as_block_model)):
        made[name] = tmp_path_factory.mktemp(name)
        options = {"head_dim": 16, "num_hidden_layers": 3}
        write(Case(name=name, kind="Qwen3", options=options, edit=edit), made[name], seed=5)
    return made


class Stages:
    """Stands where the runner of all layers has its graphs; the stages replay theirs in turn."""

    def __init__(self, llm: LLM, most_tokens: int) -> None:
        worker = llm.engine.executor
        whole: StepProgram = worker._runner._program
        told = worker.traits, worker.resolved, worker.strategies.values(), False
        captured = buckets_of(*told, NUM_STAGES)
        self.buckets = [bucket for bucket in captured if bucket.tokens <= most_tokens]
        self.links, self.ran = Queue(), list[StepLayout]()
        self.graphs = [self._capture(worker, whole, index) for index in range(NUM_STAGES)]

    def _capture(self, worker: Any, whole: StepProgram, index: int) -> StepGraphs:
        stage = Stage(index, NUM_STAGES, links=self.links)
        model = load_model(
            worker_config(worker),
            worker.checkpoint,
            device=torch.device("cpu"),
            dtype=torch.float32,
            report=lambda *told: None,
            group=Group(stage=stage),
        )
        own = stage.layers(worker.traits.num_layers)
        caches = whole.caches[own.start : own.stop]
        program = replace(whole, model=model, caches=caches, stage=stage)
        return StepGraphs(program, self.buckets, 256, lambda *told: None)

    def run(self, layout: StepLayout) -> None:
        assert all(stage.run(layout) is None for stage in self.graphs), "no stage decides"

    def has_room(self, layout: StepLayout) -> bool:
        return all(stage.has_room(layout) for stage in self.graphs)

    def forward(self, layout: StepLayout) -> torch.Tensor | None:
        hidden = [stage.forward(layout) for stage in self.graphs]
        assert not self.links.sent
        assert (hidden[0] is None) == (hidden[-1] is None), "one stage alone has room"
        if hidden[-1] is not None:
            self.ran.append(layout)
        return hidden[-1]


def worker_config(worker: Any) -> Any:
    """Of what loads a model."""
    return SimpleNamespace(load_format="auto", seed=0, model=worker.checkpoint.model_id)


def put_stages(llm: LLM, most_tokens: int = MOST_TOKENS) -> Stages:
    llm.engine.executor._runner._tables.pages.tells_late = True  # as those of a GPU
    stages = Stages(llm, most_tokens)
    llm.engine.executor._runner._graphs = stages
    return stages


@pytest.mark.parametrize("name", ["causal", "block"])
def test_stages_give_the_tokens_of_the_whole(
    folders: dict[str, Path], name: str, seed: int
) -> None:
    """Prompts beside decoding rows, single rows, and blocks; decisions of all kinds behind."""
    want = tokens(make_llm(folders[name], "triton"), seed, count=6, kinds=MIXED)
    llm = make_llm(folders[name], "triton")
    stages = put_stages(llm)
    assert tokens(llm, seed, count=6, kinds=MIXED) == want
    assert len({len(layout.places) for layout in stages.ran}) > 2, "steps of few sizes"


def test_stages_of_canvases_give_the_tokens_of_the_whole(tmp_path: Path, seed: int) -> None:
    """Aside of the pages, over them, and both in one step, which is cut in two."""
    write_llada(tmp_path, 7)
    one = make_llm(tmp_path, "sdpa")
    want = whole_canvas_tokens(one, seed, WHOLE)
    beside = canvas_tokens(one, seed, caches=BOTH, count=3)
    llm = make_llm(tmp_path, "triton")
    stages = put_stages(llm, GUIDED)
    assert whole_canvas_tokens(llm, seed, WHOLE) == want
    assert canvas_tokens(llm, seed, caches=BOTH, count=3) == beside
    assert {layout.aside is None for layout in stages.ran} == {False, True}
    assert any(layout.slot_positions is not None for layout in stages.ran)


def test_control_a_stage_that_receives_another_step_gives_other_tokens(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    want = tokens(make_llm(folders["causal"], "triton"), 1, count=6, kinds=MIXED)
    llm = make_llm(folders["causal"], "triton")
    stages = put_stages(llm)
    receive = stages.links.receive
    monkeypatch.setattr(stages.links, "receive", lambda into: receive(into.flip(0)))
    assert tokens(llm, 1, count=6, kinds=MIXED) != want


def one_token(llm: LLM, position: int, num_rows: int = 1) -> StepLayout:
    tables, stop = llm.engine.executor._runner._tables, position + 1
    spans = [Span(row, position, stop, stop, 1, stop, stop + 1) for row in range(num_rows)]
    return lay_out(spans, tables, logits_shift=1, logit_chunk=8)


def test_what_was_passed_on_stays_as_it_is(folders: dict[str, Path]) -> None:
    """The stage behind may take it when this one is steps ahead."""
    llm = make_llm(folders["causal"], "triton")
    stages = put_stages(llm, most_tokens=2)
    first = stages.graphs[0]
    with torch.inference_mode():
        llm.engine.executor._runner._tables.sampling.tokens[0, :2] = torch.tensor([7, 9])
        assert first.forward(one_token(llm, 0)) is not None
        (sent,) = stages.links.sent
        before = sent.clone()
        assert first.forward(one_token(llm, 1)) is not None
    assert torch.equal(sent, before)
    assert not torch.equal(sent, stages.links.sent[1])


def test_what_pads_does_not_grow(folders: dict[str, Path]) -> None:
    """Layers add to it; a number beyond its format would spoil what experts are chosen by."""
    llm = make_llm(folders["causal"], "triton")
    stages = put_stages(llm, most_tokens=2)
    bucket = Bucket(2, 2, 1, 0)
    for graphs in stages.graphs:
        graphs._buckets = [bucket]
    where, before = stages.graphs[-1]._hidden, []
    with torch.inference_mode():
        llm.engine.executor._runner._tables.sampling.tokens[:2, 0] = torch.tensor([7, 9])
        assert stages.forward(one_token(llm, 0, num_rows=2)) is not None
        assert where[1].any(), "a real row stood where padding will"
        for _ in range(2):
            assert stages.forward(one_token(llm, 0)) is not None
            before.append(where[1].clone())
    assert torch.equal(*before)


@pytest.mark.parametrize("name", ["causal", "block"])
def test_all_stages_have_the_sizes_of_one(folders: dict[str, Path], name: str) -> None:
    worker = make_llm(folders[name], "triton").engine.executor
    told = worker.traits, worker.resolved, worker.strategies.values(), False
    whole, staged = buckets_of(*told), buckets_of(*told, NUM_STAGES)
    assert {one[:3] for one in staged} == {one[:3] for one in whole}
    assert all(one.decided == 0 for one in staged)
    assert len(staged) == len(set(staged))
    assert worker.traits.mask_block == (BLOCK if name == "block" else 1)

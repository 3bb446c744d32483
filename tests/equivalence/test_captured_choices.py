"""Rows are decided by the graph that knows what they want, or behind one, without a GPU.

Here the graphs themselves run (`worker/graphs.py`), on stand-ins of what CUDA would replay.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from engine_service.sampling.batch import Wants
from engine_service.worker.buckets import FILTERED, PLAIN, Bucket, list_buckets
from engine_service.worker.graphs import StepGraphs
from tests.equivalence.replays import filter_as_plain, replay_on_a_cpu, watch_choices
from tests.equivalence.test_padding import (
    BEYOND,
    BLOCK,
    FILTERS,
    FIXED,
    GREEDY,
    ROWS,
    as_block_model,
    interpreted,
    make_llm,
    tokens,
)
from tests.models.checkpoints import Case, write
from tidemill.llm import LLM

pytestmark = interpreted
BLOCK_OF = {"causal": 1, "block": BLOCK}
COUNT = 6


@pytest.fixture(autouse=True)
def replays(monkeypatch: pytest.MonkeyPatch) -> None:
    replay_on_a_cpu(monkeypatch)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for name, edit in (("causal", None), ("block", as_block_model)):
        made[name] = tmp_path_factory.mktemp(name)
        options = {"head_dim": 16, "num_hidden_layers": 2}
        write(Case(name=name, kind="Qwen3", options=options, edit=edit), made[name], seed=5)
    return made


def put_graphs(llm: LLM, block: int, logit_chunk: int = 256) -> list[Wants | None]:
    """Graphs of rows of one token or of blocks, watched."""
    runner = llm.engine.executor._runner
    runner._tables.pages.tells_late = True  # as those of a GPU
    buckets = list_buckets(
        max_rows=ROWS, block=block, max_decide=block, token_budget=256, logit_limit=256
    )
    own = [bucket for bucket in buckets if bucket.longest <= 2 * block]
    runner._graphs = StepGraphs(runner._program, own, logit_chunk, lambda *told: None)
    return watch_choices(runner._graphs)


@pytest.mark.parametrize(
    ("name", "kinds", "choice"),
    [
        ("causal", GREEDY, PLAIN),
        ("causal", [*FILTERS[:1], *GREEDY], FILTERED),
        ("block", FILTERS, FILTERED),
    ],
    ids=["plain", "both", "blocks"],
)
def test_a_whole_graph_decides(
    folders: dict[str, Path], name: str, kinds: list[dict], choice: Wants, seed: int
) -> None:
    want = tokens(make_llm(folders[name], "triton"), seed, count=COUNT, kinds=kinds)
    llm = make_llm(folders[name], "triton")
    replayed = put_graphs(llm, BLOCK_OF[name])
    assert tokens(llm, seed, count=COUNT, kinds=kinds) == want
    assert choice in replayed
    assert set(replayed) <= {choice, PLAIN}, "plain rows alone go on when others have ended"


def test_what_no_graph_knows_is_decided_behind_one(folders: dict[str, Path], seed: int) -> None:
    kinds = [*BEYOND, *FILTERS]
    want = tokens(make_llm(folders["causal"], "triton"), seed, count=COUNT, kinds=kinds)
    llm = make_llm(folders["causal"], "triton")
    replayed = put_graphs(llm, 1)
    assert tokens(llm, seed, count=COUNT, kinds=kinds) == want
    assert None in replayed


def test_no_graph_filters_more_logits_than_may_exist(folders: dict[str, Path], seed: int) -> None:
    """Steps of more rows are launched, those of one row replayed."""
    want = tokens(make_llm(folders["causal"], "triton"), seed, count=COUNT, kinds=FILTERS)
    llm = make_llm(folders["causal"], "triton")
    replayed = put_graphs(llm, 1, logit_chunk=1)
    captured = llm.engine.executor._runner._graphs._captured
    filtering = {bucket for (bucket, _), own in captured.items() if FILTERED in own.wholes}
    assert filtering == {Bucket(1, 1, 1, 1)}
    assert tokens(llm, seed, count=COUNT, kinds=FILTERS) == want
    assert set(replayed) == {FILTERED}


def test_control_the_graph_of_plain_rows_gives_filtered_ones_other_tokens(
    folders: dict[str, Path],
) -> None:
    want = tokens(make_llm(folders["causal"], "triton"), FIXED, count=COUNT, kinds=FILTERS)
    llm = make_llm(folders["causal"], "triton")
    put_graphs(llm, 1)
    filter_as_plain(llm.engine.executor._runner._graphs)
    assert tokens(llm, FIXED, count=COUNT, kinds=FILTERS) != want


def test_ranks_that_share_the_head_filter_behind_a_graph(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """They alone would gather all logits for it."""
    want = tokens(make_llm(folders["causal"], "triton"), seed, count=COUNT, kinds=FILTERS)
    llm = make_llm(folders["causal"], "triton")
    program = llm.engine.executor._runner._program
    share = (0, program.model.traits.vocab_size, lambda parts: parts)
    monkeypatch.setattr(type(program.model), "vocab_share", property(lambda self: share))
    replayed = put_graphs(llm, 1)
    assert tokens(llm, seed, count=COUNT, kinds=FILTERS) == want
    assert set(replayed) == {None}


def test_graphs_are_given_up(folders: dict[str, Path]) -> None:
    llm = make_llm(folders["causal"], "triton")
    put_graphs(llm, 1)
    graphs, left = llm.engine.executor._runner._graphs, []
    for (bucket, _), own in graphs._captured.items():
        for one in (own.to_states, *(whole.graph for whole in own.wholes.values())):
            one.reset = lambda bucket=bucket: left.append(bucket)
    graphs.close()
    assert [left.count(Bucket(rows, rows, 1, rows)) for rows in (1, 2, ROWS)] == [3, 3, 3]

"""The runner with a model and a strategy small enough to compute by hand."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from engine_service.attention.base import AttentionBackend
from engine_service.core.step import PageAppend, Span
from engine_service.sampling.batch import DecideResult
from engine_service.sampling.sampler import choose, token_logprobs
from engine_service.stages import Stage
from engine_service.worker.program import StepProgram
from engine_service.worker.runner import Runner
from engine_service.worker.tables import RowTables
from tests.row_builders import causal_span, make_plan, make_row

VOCAB = 11
CPU = torch.device("cpu")


def logits_of(token: int, position: int) -> torch.Tensor:
    """What HandModel answers for one query."""
    return torch.tensor([float((token * 5 + position * 3 + v * 7) % VOCAB) for v in range(VOCAB)])


class HandModel:
    """Hidden state: (token, position), NaN of tokens that nobody is to read. Logits: `logits_of`.
    Attention plays no part."""

    vocab_share = None
    finishes_rows = False

    def __init__(self, shift: int = 1) -> None:
        self.traits = SimpleNamespace(logits_shift=shift, windows=(None,))
        self.largest_logits = 0

    def embed(self, tokens, places):
        return tokens[places]

    def __call__(self, embedded, positions, step, reads):
        assert step.caches == ("cache",)
        hidden = torch.stack((embedded, positions), dim=1).float()
        if reads is not None:
            unread = torch.ones(len(hidden), dtype=torch.bool).index_fill(0, reads, False)
            hidden[unread] = torch.nan
        return hidden

    def logits(self, hidden):
        self.largest_logits = max(self.largest_logits, len(hidden))
        return torch.stack([logits_of(int(t), int(p)) for t, p in hidden.tolist()])


class NoAttention(AttentionBackend):
    name = "none"

    def __init__(self) -> None:
        pass

    def plan(self, batch, *, window):
        return None

    def attend(self, *args, **kwargs):
        raise AssertionError("HandModel has no attention")


class Recorder:
    """A strategy's device half: takes the argmax; `keeps` says which positions become final."""

    def __init__(self, name: str, keeps=lambda positions: positions >= 0) -> None:
        self.name = name
        self.admitted: list[int] = []
        self.batches = []
        self._keeps = keeps

    def admit(self, rows):
        self.admitted += [new.row for new in rows]

    def decide(self, batch):
        self.batches.append(batch)
        token_ids = choose(batch, torch.zeros_like(batch.positions))
        final = self._keeps(batch.positions)
        batch.tables.tokens[batch.rows[final], batch.positions[final]] = token_ids[final]
        scores = token_logprobs(batch, token_ids)
        return DecideResult(
            token_ids=token_ids,
            final=final,
            logprobs=scores and scores.logprobs,
            logprob_ids=scores and scores.ids,
            ranks=scores and scores.ranks,
        )


def make_runner(*strategies: Recorder, shift: int = 1, logit_chunk: int = 100):
    tables = RowTables(
        max_rows=4,
        table_width=32,
        page_size=4,
        trash_page=40,
        mask_token_id=None,
        methods=[strategy.name for strategy in strategies],
        device=CPU,
    )
    model = HandModel(shift)
    program = StepProgram(
        model=model,
        backend=NoAttention(),
        caches=("cache",),
        tables=tables,
        strategies=strategies,
    )
    runner = Runner(program, logit_chunk=logit_chunk)
    return runner, tables, model


def all_pages(count: int) -> tuple[PageAppend, ...]:
    return tuple(PageAppend(row, 0, tuple(range(row * 8, row * 8 + 8))) for row in range(count))


def run(runner: Runner, plan):
    return runner.collect(runner.launch(plan)).own


def test_chunked_prompt_decides_only_at_its_end_and_goes_on_from_the_table():
    runner, tables, _ = make_runner(Recorder("autoregressive"))
    prompt = [3, 1, 4, 1, 5]
    first = make_plan(
        causal_span(2, 0, 3, decides=False), rows=(make_row(2, prompt),), pages=all_pages(3)
    )
    assert run(runner, first) == [None]
    got = run(runner, make_plan(causal_span(2, 3, 5, decides=True)))
    token = int(logits_of(5, 4).argmax())
    assert got[0].token_ids == [token]
    assert got[0].final == [True]
    assert got[0].logprobs is got[0].scores is None
    assert tables.sampling.tokens[2, 5] == token
    # The host never sends the new token: the next step finds it in the table.
    got = run(runner, make_plan(causal_span(2, 5, 6, decides=True)))
    assert got[0].token_ids == [int(logits_of(token, 5).argmax())]


def test_an_empty_plan_only_applies_deltas():
    runner, tables, _ = make_runner(Recorder("autoregressive"))
    assert run(runner, make_plan(rows=(make_row(0, [7]),))) == []
    assert tables.sampling.tokens[0, 0] == 7


@pytest.mark.parametrize("logit_chunk", [1, 2, 3, 100])
def test_two_methods_share_a_step_and_decisions_find_their_spans(logit_chunk):
    one = Recorder("autoregressive")
    two = Recorder("blocks", keeps=lambda positions: positions % 2 == 0)
    runner, _, model = make_runner(one, two, shift=0, logit_chunk=logit_chunk)
    rows = tuple(
        make_row(row, list(range(row, row + 8)), method=method)
        for row, method in enumerate(["blocks", "autoregressive", "blocks", "autoregressive"])
    )
    spans = (
        Span(3, 0, 8, 8, 1, 7, 8),
        Span(0, 4, 8, 8, 4, 5, 8),
        Span(1, 0, 2, 2, 1, 2, 2),
        Span(2, 4, 8, 8, 4, 4, 6),
    )
    got = run(runner, make_plan(*spans, rows=rows, pages=all_pages(4)))
    assert one.admitted == [1, 3]
    assert two.admitted == [0, 2]
    assert got[2] is None
    for span, decision in zip(spans, got, strict=True):
        if decision is None:
            continue
        places = range(span.decide_start, span.decide_stop)
        expected = [int(logits_of(span.row + p, p).argmax()) for p in places]
        assert decision.token_ids == expected
        is_blocks = span.row in (0, 2)
        assert decision.final == [not is_blocks or p % 2 == 0 for p in places]
    assert model.largest_logits <= max(3, logit_chunk)  # one span is never split
    assert all(batch.max_position == int(batch.positions.max()) for batch in one.batches)


def reference_logprobs(token: int, position: int, chosen: int, count: int):
    logprobs = logits_of(token, position).log_softmax(0)
    order = logprobs.argsort(descending=True).tolist()
    ids = (chosen, *order[:count])
    return ids, [logprobs[i].item() for i in ids], order.index(chosen) + 1


def test_logprobs_are_cut_to_each_row_and_absent_where_unwanted_or_not_final():
    keeps = Recorder("autoregressive", keeps=lambda positions: positions != 5)
    runner, _, _ = make_runner(keeps, shift=0)
    rows = (
        make_row(0, list(range(8)), logprobs=3),
        make_row(1, list(range(8))),
        make_row(2, list(range(8)), logprobs=0),
    )
    spans = tuple(Span(row, 4, 8, 8, 4, 4, 7) for row in range(3))
    got = run(runner, make_plan(*spans, rows=rows, pages=all_pages(3)))
    assert got[1].logprobs is None
    for row, count in ((0, 3), (2, 0)):
        entries = got[row].logprobs
        assert entries[1] is None
        for place in (4, 6):
            chosen = got[row].token_ids[place - 4]
            ids, logprobs, rank = reference_logprobs(place, place, chosen, count)
            entry = entries[place - 4]
            assert entry.token_ids == ids
            assert entry.logprobs == pytest.approx(logprobs, abs=1e-5)
            assert entry.rank == rank


@pytest.mark.parametrize("chunks", [(6,), (2, 6), (1, 2, 3, 4, 5, 6)])
@pytest.mark.parametrize("logit_chunk", [2, 100])
def test_prompt_scores_do_not_depend_on_chunks(chunks, logit_chunk):
    runner, _, model = make_runner(Recorder("autoregressive"), logit_chunk=logit_chunk)
    prompt = [3, 1, 4, 1, 5, 9]
    rows = (make_row(0, prompt, prompt_logprobs=2), make_row(1, [2, 2, 2]))
    start, scores = 0, []
    for index, stop in enumerate(chunks):
        spans = [causal_span(0, start, stop, decides=stop == 6, scores=6)]
        if index == 0:  # somebody else is decided in the same step
            spans.append(causal_span(1, 0, 3, decides=True))
        plan = make_plan(
            *spans, rows=rows if index == 0 else (), pages=all_pages(2) if index == 0 else ()
        )
        got = run(runner, plan)
        scores += got[0].scores or []
        start = stop
        assert bool(got[0].token_ids) == (stop == 6)
        if index == 0:
            assert got[1].token_ids == [int(logits_of(2, 2).argmax())]
            assert got[1].scores is None
    assert model.largest_logits <= max(2, logit_chunk)
    assert len(scores) == 5
    for position, entry in enumerate(scores, start=1):
        ids, logprobs, rank = reference_logprobs(
            prompt[position - 1], position - 1, prompt[position], 2
        )
        assert entry.token_ids == ids
        assert entry.logprobs == pytest.approx(logprobs, abs=1e-5)
        assert entry.rank == rank


def test_steps_may_be_launched_ahead_of_collect():
    runner, _, _ = make_runner(Recorder("autoregressive"))
    rows = (make_row(0, [3, 1], logprobs=1),)
    first = runner.launch(
        make_plan(causal_span(0, 0, 2, decides=True), rows=rows, pages=all_pages(1))
    )
    second = runner.launch(make_plan(causal_span(0, 2, 3, decides=True)))
    # The row is taken by somebody else before the first step is collected.
    runner.launch(make_plan(rows=(make_row(0, [8]),)))
    token = int(logits_of(1, 1).argmax())
    got = runner.collect(first).own[0]
    assert got.token_ids == [token]
    assert len(got.logprobs[0].token_ids) == 2
    assert runner.collect(second).own[0].token_ids == [int(logits_of(token, 2).argmax())]


@pytest.mark.parametrize("shares_layers", [False, True])
@pytest.mark.parametrize("is_flushed", [True, False, None])
def test_graphs_are_given_up_unless_the_device_waits_for_a_stage_that_is_gone(
    is_flushed, shares_layers
):
    """None: there are no stages. Giving them up waits for the device, and that would not end; but
    nobody leaves whose collectives they hold."""
    runner, *_ = make_runner(Recorder("one"))
    given_up = []
    runner._graphs = SimpleNamespace(close=lambda: given_up.append(True))
    if is_flushed is not None:
        links = SimpleNamespace(flush=lambda: is_flushed)
        runner._program = replace(runner._program, stage=Stage(0, 2, links=links))
    runner.close(shares_layers=shares_layers)
    assert bool(given_up) == (is_flushed is not False or shares_layers)

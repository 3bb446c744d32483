"""Whole answers, drafted by one model and verified by a second, against the paper's loop.

The second model is a Qwen3 with random weights: transformers computes it in the loop, one forward a
token, and the engine's own model as the verifier, one causal pass a draft.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import transformers

from engine_service.core.step import FULL
from engine_service.decoding.verifier import Draft, Verifier, accepted
from engine_service.sampling.batch import DecideBatch
from engine_service.sampling.head import KnownLogits
from engine_service.sampling.sampler import choose
from engine_service.sampling.tables import SamplingTables
from tests.equivalence.apd_reference import Knobs, decode
from tests.fakes import MASK, VOCAB, ToyModel
from tests.models.checkpoints import Case, load, write
from tests.models.paged import PagedRunner, PageTable, causal
from tests.sampling_batches import Row, make_tables, make_wants

LENGTH, ANSWER, LOOKAHEAD = 40, 16, 6
QWEN3 = Case(name="tiny", kind="Qwen3", options={"head_dim": 32, "vocab_size": VOCAB})


class PagedVerifier:
    """The engine's model of a checkpoint, over a paged cache of its own that it fills anew."""

    def __init__(self, folder: Path, num_rows: int) -> None:
        model = load(folder, torch.float64)
        table = PageTable(num_rows, LENGTH, page_size=4, seed=0)
        self._runner = PagedRunner(model, "sdpa", table)
        self.num_passes = 0

    def logits(self, batch: DecideBatch, token_ids: torch.Tensor) -> torch.Tensor:
        self.num_passes += 1
        tokens, spans = list(batch.tables.tokens.clone()), []
        tokens_of = token_ids.split(batch.cu_decide.diff().tolist())
        starts = batch.positions[batch.cu_decide[:-1]].tolist()
        rows = batch.span_rows.tolist()
        for row, start, own in zip(rows, starts, tokens_of, strict=True):
            tokens[row][start : start + len(own)] = own
            spans.append(causal(row, 0, start + len(own) - 1))
        every = self._runner.logits(tokens, spans)
        return torch.cat([each[start - 1 :] for each, start in zip(every, starts, strict=True)])


@dataclass
class Rows:
    """Canvases of several rows in one table, and how often each of them has decided."""

    toy: ToyModel
    tables: SamplingTables
    ends: list[int]
    knobs: list[Knobs]

    def batch(self, lookahead: int) -> DecideBatch | None:
        """One span per open row, from its first to its last open position in sight."""
        tables, logits, ranges = self.tables, [], []
        for row, end in enumerate(self.ends):
            is_open = [p for p in range(end) if not tables.fixed[row, p]]
            if is_open:
                seen = min(is_open[0] + lookahead, end)
                start, stop = is_open[0], max(p for p in is_open if p < seen) + 1
                dense = self.toy.dense(tables.tokens[row, :seen].tolist(), FULL)
                logits.append(dense[start:stop])
                ranges.append((row, start, stop))
        if not ranges:
            return None
        ends = torch.tensor([stop - start for _, start, stop in ranges]).cumsum(0).tolist()
        return DecideBatch(
            logits=KnownLogits(torch.cat(logits)),
            rows=torch.tensor([row for row, start, stop in ranges for _ in range(start, stop)]),
            positions=torch.tensor([p for _, start, stop in ranges for p in range(start, stop)]),
            span_rows=torch.tensor([row for row, *_ in ranges]),
            cu_decide=torch.tensor([0, *ends]),
            tables=tables,
            wants=make_wants([Row(temperature=1.0)]),
        )


def decode_batched(
    rows: Rows, verifier: Verifier, *, late: int = 0
) -> tuple[list[list[int]], list[list[int]]]:
    """(tokens, tokens kept per step) of every row; `late` shifts the target's draws."""
    counts: list[list[int]] = [[] for _ in rows.ends]
    weight = torch.tensor([knobs.weight for knobs in rows.knobs], dtype=torch.float64)
    while (batch := rows.batch(LOOKAHEAD)) is not None:
        tables = rows.tables
        draws = torch.tensor([len(count) for count in counts])[batch.rows]
        is_open = ~tables.fixed[batch.rows, batch.positions]
        standing = tables.tokens[batch.rows, batch.positions]
        token_ids = torch.where(is_open, choose(batch, draws), standing)
        draft = Draft(token_ids=token_ids, is_open=is_open, draws=draws + late)
        logits = verifier.logits(batch, token_ids)
        kept = accepted(batch, draft, logits, weight[batch.span_rows])
        tables.tokens[batch.rows[kept], batch.positions[kept]] = token_ids[kept]
        tables.fixed[batch.rows[kept], batch.positions[kept]] = True
        for row in batch.span_rows.tolist():
            counts[row].append(int(kept[batch.rows == row].sum()))
    found = zip(rows.tables.tokens.tolist(), rows.ends, strict=False)
    return [tokens[:end] for tokens, end in found], counts


def random_rows(seed: int) -> tuple[Rows, list[list[int | None]]]:
    """Six rows with prompts of their own, two of them with pinned tokens, and the same as lists."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(VOCAB - 1) for _ in range(rng.randint(1, 20))] for _ in range(6)]
    temperatures = [0.0, 0.2, 1.0] * 2
    knobs = [
        Knobs(
            weight=rng.choice([0.3, 0.6, 0.9]),
            temperature=temperature,
            seed=rng.getrandbits(60),
            banned=(MASK,),
        )
        for temperature in temperatures
    ]
    lines = [Row(temperature=k.temperature, seed=k.seed) for k in knobs]
    tables = make_tables(lines, banned=(MASK,), width=LENGTH)
    tables.tokens[:] = MASK
    lists: list[list[int | None]] = []
    for row, prompt in enumerate(prompts):
        answer: list[int | None] = [None] * ANSWER
        for place in rng.sample(range(ANSWER), 5 if row < 2 else 0):
            answer[place] = rng.randrange(VOCAB - 1)
        whole = [*prompt, *answer]
        lists.append(whole)
        for position, token in enumerate(whole):
            if token is not None:
                tables.tokens[row, position], tables.fixed[row, position] = token, True
    toy = ToyModel(seed)
    toy.head /= 4  # less sure than the verifier, so that this one is heard
    return Rows(toy, tables, [len(whole) for whole in lists], knobs), lists


@pytest.mark.parametrize("seed", range(3))
def test_answers_are_those_of_the_papers_loop(seed: int, tmp_path: Path) -> None:
    theirs = write(QWEN3, tmp_path, seed).double()
    rows, lists = random_rows(seed)
    verifier = PagedVerifier(tmp_path, len(rows.ends))

    def marginals_of(seen: list[int | None]) -> list[list[float]]:
        canvas = [MASK if token is None else token for token in seen]
        return [line.tolist() for line in rows.toy.dense(canvas, FULL)]

    want = [
        decode(marginals_of, next_logits_of(theirs), whole, LOOKAHEAD, knobs)
        for whole, knobs in zip(lists, rows.knobs, strict=True)
    ]
    spoilt = replace(rows, tables=replace(rows.tables, **copied(rows.tables)))
    tokens, counts = decode_batched(rows, verifier)
    assert tokens == [answer for answer, _ in want]
    assert counts == [kept for _, kept in want]
    # One causal pass a step, whatever the rows keep; some steps keep several tokens.
    assert verifier.num_passes == max(map(len, counts))
    assert max(map(max, counts)) > 1
    # With noise of the target's own the greedy rows alone go on as they did.
    _, others = decode_batched(spoilt, verifier, late=1000)
    same = [row for row in range(len(counts)) if others[row] == counts[row]]
    assert {row for row, knobs in enumerate(rows.knobs) if knobs.temperature == 0} <= {*same}
    assert len(same) < len(counts)


def next_logits_of(model: transformers.PreTrainedModel):  # type: ignore[no-untyped-def]
    """The logits behind a prefix."""

    def next_logits(prefix: list[int]) -> list[float]:
        with torch.inference_mode():
            return list(model(torch.tensor([prefix])).logits[0, -1].tolist())

    return next_logits


def copied(tables: SamplingTables) -> dict[str, torch.Tensor]:
    return {"tokens": tables.tokens.clone(), "fixed": tables.fixed.clone()}

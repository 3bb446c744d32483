"""What happens behind a choice of tokens, by the kernel: that of plain torch, for every rule."""

from __future__ import annotations

import copy
import random
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from engine_service.decoding.reveal import RevealTables
from engine_service.decoding.reveal_knobs import RevealKnobs
from engine_service.decoding.rules import RULES
from engine_service.decoding.settle import InTorch, OnDevice
from engine_service.kernels.confidence import Confidence
from engine_service.kernels.reveal import MAX_BLOCK
from engine_service.kernels.reveal_rows import RowStates
from engine_service.sampling.batch import DecideBatch
from engine_service.sampling.head import KnownLogits
from tests.sampling_batches import Row, make_tables, make_wants

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCAB, MASK = 40, 3


def random_knobs(rng: random.Random, name: str, length: int) -> RevealKnobs:
    """Any value of everything, whether the rule reads it or not."""
    return RevealKnobs(
        remasking=name,
        threshold=rng.choice([0.0, 0.25, 0.5, 0.9, 2.0]),
        steps=rng.randint(1, length),
        factor=rng.choice([0.0, 0.5, 1.0, 3.0]),
        entropy_bound=rng.choice([0.0, 0.4, 3.0]),
        max_parallel=rng.randint(1, 6),
        start_threshold=rng.choice([0.1, 0.3, 0.9]),
        low_threshold=rng.choice([0.0, 0.25]),
        alg_temp=rng.choice([0.0, 0.0, 0.7]),
        eos_last=rng.random() < 0.3,
        edit_threshold=rng.choice([None, None, 0.3]),
        max_post_edit_steps=rng.randint(0, 2),
    )


class Bench:
    """Rows with a block each, decided by both from equal states."""

    def __init__(self, seed: int, names: list[str], width: int) -> None:
        rng = self.rng = random.Random(seed)
        self.draw = torch.Generator().manual_seed(seed)
        self.width, count = width, len(names)
        lengths = [rng.randint(1, width) for _ in names]
        prompts = [rng.randint(1, 9) for _ in names]
        origins = [rng.choice([0, prompt]) for prompt in prompts]
        # Blocks behind the first one, of which some positions may be prompt.
        self.starts = [o + n * rng.randint(0, 2) for o, n in zip(origins, lengths, strict=True)]
        self.stops = [s + n for s, n in zip(self.starts, lengths, strict=True)]
        lines = [Row(prompt_len=prompt, seed=rng.getrandbits(40)) for prompt in prompts]
        self.tables = make_tables([*lines, Row()], banned=(MASK,), width=max(self.stops) + 1)
        self.tables.tokens[:] = MASK
        self.half = RevealTables(count, torch.device("cpu"), mask_token_id=MASK)
        self.half.admit(
            range(count),
            [random_knobs(rng, name, n) for name, n in zip(names, lengths, strict=True)],
            steps_taken=[0] * count,
            block_starts=self.starts,
            origins=origins,
            blocks=lengths,
        )

    def batch(self) -> DecideBatch:
        """Spans that begin anywhere in their blocks, and padding."""
        order = self.rng.sample(range(len(self.starts)), len(self.starts))
        firsts = [self.rng.randint(self.starts[row], self.stops[row] - 1) for row in order]
        spans = [range(first, self.stops[row]) for first, row in zip(firsts, order, strict=True)]
        cu = [0, *torch.tensor([len(span) for span in spans]).cumsum(0).tolist()]
        trash, spare = len(order), 3
        rows = [row for row, span in zip(order, spans, strict=True) for _ in span]
        return DecideBatch(
            logits=KnownLogits(torch.zeros(0, VOCAB)),
            rows=torch.tensor(rows + [trash] * spare),
            positions=torch.tensor([p for span in spans for p in span] + [0] * spare),
            span_rows=torch.tensor([*order, trash, trash]),
            cu_decide=torch.tensor([*cu, cu[-1], cu[-1] + spare]),
            tables=self.tables,
            wants=make_wants([Row()]),
        )

    def choice(self, count: int) -> Confidence:
        """Few different numbers, so that many are equal."""
        steps = torch.randint(0, 9, (3, count), generator=self.draw) / 8.0
        ids = torch.randint(4, 14, (count,), generator=self.draw)
        return Confidence(token_ids=ids, probs=steps[0], entropy=steps[2], margin=steps[1])


def moved(thing: Any) -> Any:
    """A copy of tensors, or of what has them in its fields, on the device."""
    if isinstance(thing, torch.Tensor):
        return thing.clone().to(device)
    if isinstance(thing, tuple):
        return type(thing)(*map(moved, thing))
    kept = {f.name: getattr(thing, f.name) for f in fields(thing)}
    return replace(thing, **{n: moved(x) for n, x in kept.items() if isinstance(x, torch.Tensor)})


def check_steps(bench: Bench, num_steps: int) -> int:
    """Decides by both, each from where plain torch left; how many positions fell."""
    state, num_fallen = bench.half._state, 0
    for _ in range(num_steps):
        batch = bench.batch()
        choice = bench.choice(len(batch.rows))
        there = replace(moved(batch), tables=moved(batch.tables))
        rows: RowStates = moved(state.rows)
        theirs = replace(state, rows=rows)
        was_fixed = batch.tables.fixed.clone()
        slow, fast = InTorch(batch, state, bench.width), OnDevice(there, theirs, bench.width)
        want, got = slow.settle(choice), fast.settle(moved(choice))
        real = int(batch.cu_decide[-3])
        assert fast.draws[:real].tolist() == slow.draws[:real].tolist()
        assert got.token_ids[:real].tolist() == want.token_ids[:real].tolist()
        assert got.final[:real].tolist() == want.final[:real].tolist()
        # All lines but that of padding.
        assert there.tables.tokens[:-1].tolist() == batch.tables.tokens[:-1].tolist()
        assert there.tables.fixed[:-1].tolist() == batch.tables.fixed[:-1].tolist()
        for mine, own in zip(rows, state.rows, strict=True):
            assert mine[:-1].tolist() == own[:-1].tolist()
        num_fallen += int((batch.tables.fixed & ~was_fixed)[:-1].sum())
    return num_fallen


@pytest.mark.parametrize("name", RULES)
def test_every_rule_falls_as_in_plain_torch(name: str, seed: int) -> None:
    assert check_steps(Bench(seed, [name] * 12, width=9), 5) > 12


@pytest.mark.parametrize("width", [1, 2, 32, 33, MAX_BLOCK])
def test_blocks_of_many_lengths_and_rules(width: int, seed: int) -> None:
    names = [random.Random(seed).choice(list(RULES)) for _ in range(10)]
    assert check_steps(Bench(seed, names, width), 4) >= 10


def test_longer_blocks_are_refused(seed: int) -> None:
    bench = Bench(seed, ["threshold"], MAX_BLOCK + 1)
    batch = bench.batch()
    there, rows = replace(moved(batch), tables=moved(batch.tables)), moved(bench.half._state.rows)
    state = replace(bench.half._state, rows=rows)
    with pytest.raises(AssertionError, match=f"blocks of {MAX_BLOCK + 1}"):
        OnDevice(there, state, MAX_BLOCK + 1).settle(moved(bench.choice(len(batch.rows))))


@pytest.mark.parametrize("field", ["rules", "limits", "progress", "adapted"])
def test_control_another_state_of_the_rows_is_noticed(field: str, seed: int) -> None:
    """Of every table that the kernel reads, one number that is wrong for every row."""
    noticed, more = False, 0
    while not noticed and more < 64:  # few of the draws depend on how much a row has adapted
        more += 1
        bench = Bench(seed + more, ["adaptive", "low_confidence", "threshold"] * 3, width=9)
        check_steps(bench, 1)
        right = copy.deepcopy(bench.half._state.rows)
        wrong = moved(right)
        column = {"rules": (..., 2), "limits": (..., 0), "progress": (..., 0), "adapted": ...}
        getattr(wrong, field)[column[field]] += 3
        batch = bench.batch()
        choice = bench.choice(len(batch.rows))
        made = []
        for rows in (moved(right), wrong):
            there = replace(moved(batch), tables=moved(batch.tables))
            state = replace(bench.half._state, rows=rows)
            made.append(OnDevice(there, state, bench.width).settle(moved(choice)).final.tolist())
        real = int(batch.cu_decide[-3])
        noticed = made[0][:real] != made[1][:real]
    assert noticed

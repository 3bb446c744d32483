"""Adjusted scores: the kernels against the plain formulas of the sampler."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from engine_service.kernels.penalties import Penalties, Slots, adjusted_scores_triton
from engine_service.kernels.vocab_tiles import TILE
from engine_service.sampling.batch import DecideBatch
from engine_service.sampling.processors import adjust, allowed_logits
from tests.sampling_batches import Row, make_batch, on_device

device = "cuda" if torch.cuda.is_available() else "cpu"


def adjusted(batch: DecideBatch) -> torch.Tensor:
    there = on_device(batch, device)
    tables, wants = there.tables, there.wants
    penalties = Penalties(
        tables.tokens, tables.prompt_lens, tables.repetition_penalty, tables.presence_penalty,
        tables.frequency_penalty,
    )  # fmt: skip
    slots = Slots(
        tables.bias_ids, tables.bias_values, tables.suppress_ids, tables.min_tokens,
        tables.prompt_lens,
    )  # fmt: skip
    return adjusted_scores_triton(
        there.logits_NV,
        there.rows,
        there.positions,
        tables.banned_ids,
        penalties=penalties if wants.penalties else None,
        slots=slots if wants.bias or wants.suppress else None,
        max_position=int(batch.positions.max()),
    ).cpu()


def random_row(rng: random.Random, vocab: int) -> Row:
    few = [rng.randrange(vocab) for _ in range(5)]
    tokens = [rng.choice(few) for _ in range(rng.randint(1, 16))]
    return Row(
        tokens=tokens,
        prompt_len=rng.randint(1, len(tokens)),
        repetition_penalty=rng.choice([1.0, 1.5, 0.7]),
        presence_penalty=rng.choice([0.0, 1.2, -0.5]),
        frequency_penalty=rng.choice([0.0, 0.6]),
        min_tokens=rng.choice([0, 2, 20]),
        suppress=tuple(rng.sample(range(vocab), rng.randint(0, 9))),
        bias={rng.randrange(vocab): rng.uniform(-3, 3) for _ in range(rng.randint(0, 5))},
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("vocab", [9, 1000, TILE + 11])
def test_scores_equal_those_of_the_formulas(vocab: int, dtype: torch.dtype, seed: int) -> None:
    torch.manual_seed(seed)
    rng = random.Random(seed)
    rows = [random_row(rng, vocab) for _ in range(7)]
    logits = (torch.randn(7, vocab) * 4).to(dtype)
    batch = make_batch(logits, rows, banned=(3,))
    kept = logits.clone()
    for part in ({}, {"penalties": False}, {"bias": False, "suppress": False}):
        wants = dataclasses.replace(batch.wants, penalties=True, bias=True, suppress=True)
        asked = dataclasses.replace(batch, wants=dataclasses.replace(wants, **part))
        got = adjusted(asked)
        # Bit for bit: a sum of bias and score has no order, everything else is rounded alike.
        assert torch.equal(got, adjust(allowed_logits(asked), asked))
        assert not torch.equal(got, allowed_logits(asked)) or vocab == 9
    assert torch.equal(logits, kept)


def test_only_what_stands_before_the_position_counts() -> None:
    row = Row(tokens=[1, 2, 2, 3], prompt_len=1, frequency_penalty=0.5, repetition_penalty=2.0)
    logits = torch.full((1, 6), 8.0)
    batch = make_batch(logits, [row], positions=[3])
    assert adjusted(batch).tolist() == [[8.0, 4.0, 3.0, 8.0, 8.0, 8.0]]
    later = make_batch(logits, [row], positions=[4])
    assert adjusted(later)[0, 3] == 3.5


def test_long_histories_are_counted_over_several_programs(seed: int) -> None:
    torch.manual_seed(seed)
    tokens = torch.randint(0, 40, (2500,)).tolist()
    row = Row(tokens=tokens, prompt_len=1100, frequency_penalty=0.125)
    batch = make_batch(torch.zeros(1, 50), [row])
    batch = dataclasses.replace(
        batch,
        tables=dataclasses.replace(batch.tables, tokens=torch.tensor([tokens + [0] * 60])),
    )
    counts = torch.bincount(torch.tensor(tokens[1100:]), minlength=50)
    assert torch.equal(adjusted(batch)[0], -0.125 * counts.float())

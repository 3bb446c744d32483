"""The sampler against the definitions, written out row by row in plain Python."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_service.sampling.filters import keep_likely
from engine_service.sampling.processors import adjust, allowed_logits
from engine_service.sampling.sampler import choose, choose_with_confidence, token_logprobs
from tests.sampling_batches import Row, make_batch

NEVER = float("-inf")


def zeros(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int64)


def sample_many(logits: torch.Tensor, row: Row, draws: int, *, bound: int | None = None):
    """Counts per token over `draws` seeds of one distribution."""
    rows = [dataclasses.replace(row, seed=seed) for seed in range(draws)]
    batch = make_batch(logits.expand(draws, -1), rows)
    wants = dataclasses.replace(batch.wants, max_top_k=bound)
    batch = dataclasses.replace(batch, wants=wants)
    chosen = choose(batch, zeros(draws))
    return torch.bincount(chosen, minlength=logits.shape[0]).double()


def chi_square(counts: torch.Tensor, probs: torch.Tensor) -> float:
    expected = probs * counts.sum()
    assert counts[expected == 0].sum() == 0
    kept = expected > 0
    return (((counts - expected)[kept]) ** 2 / expected[kept]).sum().item()


def adjust_slowly(logits: list[float], row: Row, position: int, banned: tuple[int, ...]):
    """The definitions of penalties, bias, minimum length and bans for one row."""
    scores = list(logits)
    for token in banned:
        scores[token] = NEVER
    before = row.tokens[:position]
    output = before[row.prompt_len :]
    for token in set(before):
        raw = scores[token]
        penalty = row.repetition_penalty
        scores[token] = raw / penalty if raw > 0 else raw * penalty
    for token in range(len(scores)):
        scores[token] -= row.frequency_penalty * output.count(token)
        scores[token] -= row.presence_penalty * (token in output)
    for token, value in row.bias.items():
        scores[token] += value
    if position - row.prompt_len < row.min_tokens:
        for token in row.suppress:
            scores[token] = NEVER
    return scores


def support_slowly(scores: list[float], row: Row) -> set[int]:
    """Tokens that survive temperature, top-k, top-p and min-p; of equals lower ids first."""
    scaled = [score / row.temperature for score in scores]
    order = sorted(range(len(scaled)), key=lambda token: (-scaled[token], token))
    if row.top_k:
        order = order[: row.top_k]
    best = scaled[order[0]]
    weights = [math.exp(scaled[token] - best) for token in order]
    probs = [weight / sum(weights) for weight in weights]
    kept, mass = set(), 0.0
    for token, prob in zip(order, probs, strict=True):
        if kept and (mass >= row.top_p or prob < row.min_p * probs[0]):
            continue
        kept.add(token)
        mass += prob
    return kept


def random_row(rng: random.Random, vocab: int) -> Row:
    tokens = [rng.randrange(vocab) for _ in range(rng.randint(1, 10))]
    return Row(
        tokens=tokens,
        prompt_len=rng.randint(1, len(tokens)),
        temperature=rng.choice([0.0, 0.5, 1.0, 1.7]),
        top_p=rng.choice([1.0, 0.9, 0.3, 0.01]),
        top_k=rng.choice([0, 1, 3, vocab]),
        min_p=rng.choice([0.0, 0.1, 0.9]),
        repetition_penalty=rng.choice([1.0, 1.5, 0.7]),
        presence_penalty=rng.choice([0.0, 1.2, -0.5]),
        frequency_penalty=rng.choice([0.0, 0.6]),
        seed=rng.getrandbits(64),
        min_tokens=rng.choice([0, 2, 20]),
        suppress=tuple(rng.sample(range(vocab), rng.randint(0, 2))),
        bias={rng.randrange(vocab): rng.uniform(-3, 3) for _ in range(rng.randint(0, 3))},
    )


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**32), cut=st.booleans())
def test_scores_and_supports_follow_the_definitions(seed, cut):
    rng = random.Random(seed)
    vocab, count = 13, 6
    rows = [random_row(rng, vocab) for _ in range(count)]
    logits = torch.tensor(
        [[rng.gauss(0, 2) for _ in range(vocab)] for _ in rows], dtype=torch.float64
    )
    batch = make_batch(logits, rows, banned=(4,))
    if cut:  # the host's bound on positions changes nothing
        batch = dataclasses.replace(batch, max_position=max(len(row.tokens) for row in rows))
    scores = adjust(allowed_logits(batch), batch)
    chosen = choose(batch, zeros(count)).tolist()
    for index, row in enumerate(rows):
        expected = adjust_slowly(logits[index].tolist(), row, len(row.tokens), (4,))
        torch.testing.assert_close(
            scores[index], torch.tensor(expected, dtype=torch.float64), rtol=1e-5, atol=1e-5
        )
        if row.temperature == 0:
            assert chosen[index] == max(range(vocab), key=lambda t: (expected[t], -t))
        else:
            assert chosen[index] in support_slowly(expected, row)


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    top_k=st.integers(0, 8),
    top_p=st.sampled_from([1.0, 0.95, 0.6, 0.2]),
    min_p=st.sampled_from([0.0, 0.05, 0.4]),
)
def test_kept_tokens_are_those_of_the_reference(seed, top_k, top_p, min_p):
    rng = random.Random(seed)
    row = Row(temperature=1.0, top_k=top_k, top_p=top_p, min_p=min_p)
    logits = torch.tensor([[rng.gauss(0, 2) for _ in range(9)]], dtype=torch.float32)
    values, ids = keep_likely(logits, make_batch(logits, [row]))
    kept = set(ids[values > NEVER].tolist())
    assert kept == support_slowly(logits[0].tolist(), row)


@pytest.mark.parametrize("bound", [3, 5, 8])
def test_a_bound_on_top_k_changes_nothing_even_among_equals(bound):
    rng = random.Random(bound)
    logits = torch.tensor([[float(rng.choice([-1, -0.0, 0, 2])) for _ in range(40)]] * 50)
    rows = [Row(temperature=1.0, top_k=3, top_p=0.9, seed=seed) for seed in range(50)]
    free = make_batch(logits, rows)
    bounded = dataclasses.replace(free, wants=dataclasses.replace(free.wants, max_top_k=bound))
    values, ids = keep_likely(logits, free)
    few_values, few_ids = keep_likely(logits, bounded)
    assert few_ids.shape[1] == bound
    assert torch.equal(few_ids, ids[:, :bound])
    assert torch.equal(few_values, values[:, :bound])
    assert torch.equal(choose(free, zeros(50)), choose(bounded, zeros(50)))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_samples_follow_the_softmax(temperature):
    torch.manual_seed(1)
    logits = torch.randn(12) * 2
    counts = sample_many(logits, Row(temperature=temperature), 20_000)
    probs = (logits.double() / temperature).softmax(0)
    assert chi_square(counts, probs) < 40  # 11 degrees of freedom: 99.99 % point is 38
    wrong = (logits.double() / (temperature * 1.2)).softmax(0)
    assert chi_square(counts, wrong) > 40  # the test can fail


@pytest.mark.parametrize(
    ("row", "bound"),
    [
        (Row(temperature=1.0, top_k=4), 4),
        (Row(temperature=1.0, top_k=4), None),
        (Row(temperature=0.8, top_p=0.8), None),
        (Row(temperature=1.3, min_p=0.2), None),
        (Row(temperature=1.0, top_k=6, top_p=0.9, min_p=0.05), 6),
    ],
)
def test_filtered_samples_follow_the_renormalised_softmax(row, bound):
    torch.manual_seed(2)
    logits = torch.randn(15) * 1.5
    counts = sample_many(logits, row, 20_000, bound=bound)
    kept = torch.tensor(sorted(support_slowly(logits.tolist(), row)))
    probs = torch.zeros(15, dtype=torch.float64)
    probs[kept] = (logits[kept].double() / row.temperature).softmax(0)
    assert chi_square(counts, probs) < 45


def test_greedy_takes_the_lowest_of_equals():
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0], [5.0, 5.0, 5.0, 5.0]])
    rows = [Row(), Row()]
    assert choose(make_batch(logits, rows), zeros(2)).tolist() == [1, 0]
    mixed = make_batch(logits, [Row(), Row(temperature=1.0)])
    assert choose(mixed, zeros(2))[0] == 1


def test_probs_are_of_the_raw_logits_without_banned_ids():
    logits = torch.tensor([[1.0, 2.0, 9.0, 0.0]])
    row = Row(temperature=0.0, bias={0: 50.0})
    choice = choose_with_confidence(make_batch(logits, [row], banned=(2,)), zeros(1))
    assert choice.token_ids.tolist() == [0]
    expected = torch.tensor([1.0, 2.0, 0.0]).softmax(0)[0]
    torch.testing.assert_close(choice.probs[0], expected)
    assert logits[0, 2] == 9.0  # the batch is not written to


def test_a_row_that_allows_nothing_has_a_probability():
    """Rules compare it; no number is above or below none."""
    logits = torch.tensor([[NEVER, NEVER, NEVER], [0.0, NEVER, 1.0]])
    rows = [Row(temperature=temperature, bias={0: 0.5}) for temperature in (0.0, 1.0)]
    probs = choose_with_confidence(make_batch(logits, rows, banned=(1,)), zeros(2)).probs
    assert probs.isfinite().all(), probs
    assert 0 < probs[1] < 1


def test_a_row_does_not_depend_on_its_batch():
    torch.manual_seed(3)
    rng = random.Random(3)
    rows = [random_row(rng, 20) for _ in range(8)]
    logits = torch.randn(8, 20)
    together = choose(make_batch(logits, rows), zeros(8)).tolist()
    alone = [int(choose(make_batch(logits[i : i + 1], [rows[i]]), zeros(1))) for i in range(8)]
    assert together == alone
    order = list(range(8))[::-1]
    turned = choose(make_batch(logits[order], [rows[i] for i in order]), zeros(8))
    assert turned.tolist() == [together[i] for i in order]


def test_position_draw_and_choice_change_the_draw():
    logits = torch.zeros(200, 50)
    rows = [Row(temperature=1.0, seed=5) for _ in range(200)]
    base = choose(make_batch(logits, rows, positions=[3] * 200), zeros(200))
    assert len(base.unique()) == 1
    by_position = choose(make_batch(logits, rows, positions=list(range(200))), zeros(200))
    by_draw = choose(make_batch(logits, rows, positions=[3] * 200), torch.arange(200))
    choices = [Row(temperature=1.0, seed=5, choice=n) for n in range(200)]
    by_choice = choose(make_batch(logits, choices, positions=[3] * 200), zeros(200))
    for other in (by_position, by_draw, by_choice):
        assert len(other.unique()) > 40


def test_half_precision_logits_are_taken_as_float32():
    torch.manual_seed(4)
    logits = torch.randn(4, 30).bfloat16()
    rows = [Row(temperature=1.0, seed=seed) for seed in range(4)]
    half = choose_with_confidence(make_batch(logits, rows), zeros(4))
    full = choose_with_confidence(make_batch(logits.float(), rows), zeros(4))
    assert torch.equal(half.token_ids, full.token_ids)
    assert half.probs.dtype == torch.float32


def test_token_logprobs_are_raw_chosen_first_then_best():
    torch.manual_seed(5)
    logits = torch.randn(6, 11, dtype=torch.float64)
    rows = [Row(bias={3: 4.0}, temperature=0.7, seed=n) for n in range(6)]
    batch = make_batch(logits, rows, logprobs=3)
    chosen = choose(batch, zeros(6))
    scores = token_logprobs(batch, chosen)
    for index, token in enumerate(chosen.tolist()):
        reference = logits[index].log_softmax(0)
        order = reference.argsort(descending=True).tolist()
        assert scores.ids[index].tolist() == [token, *order[:3]]
        assert scores.ranks[index].item() == order.index(token) + 1
        torch.testing.assert_close(scores.logprobs[index], reference[scores.ids[index]].float())


def test_logprobs_only_when_wanted_and_zero_alternatives_is_a_wish():
    logits = torch.randn(2, 5)
    unwanted = make_batch(logits, [Row(), Row()])
    assert token_logprobs(unwanted, zeros(2)) is None
    wanted = make_batch(logits, [Row(), Row()], logprobs=0)
    assert token_logprobs(wanted, zeros(2)).logprobs.shape == (2, 1)
    more_than_there_are = make_batch(logits, [Row(), Row()], logprobs=20)
    assert token_logprobs(more_than_there_are, zeros(2)).ids.shape == (2, 6)

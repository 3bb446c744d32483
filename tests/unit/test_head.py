"""Which decisions read all logits at once, and that those which do not decide the same."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from torch.nn import functional

from engine_service.kernels.confidence import Confidence
from engine_service.sampling import sampler
from engine_service.sampling.batch import DecideBatch
from engine_service.sampling.head import HeadLogits, KnownLogits, UnfinishedLogits
from engine_service.sampling.sampler import choose, choose_with_confidence, token_logprobs
from tests.sampling_batches import Row, make_batch

VOCAB, BANNED = 120, (7, 119)
EXTRAS = {
    "top_k": 3,
    "top_p": 0.5,
    "min_p": 0.1,
    "presence_penalty": 0.5,
    "repetition_penalty": 1.3,
    "bias": {3: 2.0},
    "min_tokens": 9,
}


class Head:
    """Counts how often all logits are multiplied at once, and notes of how many rows any are."""

    vocab_share = None

    def __init__(self, weight: torch.Tensor, *, is_product: bool = True) -> None:
        self.weight = weight
        self.num_whole = 0
        self.rows: list[int] = []
        self._is_product = is_product

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.num_whole += 1
        self.rows.append(len(hidden))
        return functional.linear(hidden, self.weight)

    def head_factors(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        if not self._is_product:
            return None
        self.rows.append(len(hidden))
        return hidden, self.weight


def both_ways(
    rows: list[Row], *, logprobs: int | None = None, is_product: bool = True
) -> tuple[DecideBatch, DecideBatch, Head]:
    """The same batch with logits to be multiplied and with known ones."""
    # Whole numbers: products of any width have the same bits, and many logits are equal.
    hidden = torch.randint(-3, 4, (len(rows), 16)).float() / 4
    head = Head(torch.randint(-3, 4, (VOCAB, 16)).float() / 2, is_product=is_product)
    logits = functional.linear(hidden, head.weight)
    known = make_batch(logits, rows, banned=BANNED, logprobs=logprobs)
    return dataclasses.replace(known, logits=HeadLogits(head, hidden)), known, head


def draws_of(batch: DecideBatch) -> torch.Tensor:
    return torch.arange(len(batch.rows))


def assert_equal(got: Confidence, want: Confidence) -> None:
    assert got.token_ids.tolist() == want.token_ids.tolist()
    for name in ("probs", "entropy", "margin"):
        torch.testing.assert_close(
            getattr(got, name), getattr(want, name), rtol=1e-5, atol=1e-6, msg=name
        )


@pytest.mark.parametrize("piece", [11, 50, VOCAB])
@pytest.mark.parametrize("hottest", [0.0, 1.5])
def test_plain_rows_decide_the_same_without_all_logits(
    piece: int, hottest: float, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(seed)
    rng = random.Random(seed)
    monkeypatch.setattr(sampler, "PIECE", piece)
    heat = rng.choices([0.0, hottest], k=40)
    rows = [Row(temperature=one, seed=rng.getrandbits(64)) for one in heat]
    lazy, known, head = both_ways(rows)
    got = choose_with_confidence(lazy, draws_of(lazy))
    assert head.num_whole == 0
    assert_equal(got, choose_with_confidence(known, draws_of(known)))
    assert got.token_ids.tolist() == choose(known, draws_of(known)).tolist()


def test_greedy_numbers_are_the_same_to_the_last_bit(seed: int) -> None:
    """A row's confidence decides what falls, and must not depend on what others of the batch want:
    with one more row that wants log-probabilities all of them read all logits."""
    torch.manual_seed(seed)
    lazy, _, head = both_ways([Row()] * 40)
    wants = dataclasses.replace(lazy.wants, max_logprobs=2)
    mixed = dataclasses.replace(lazy, wants=wants)
    want = choose_with_confidence(mixed, draws_of(mixed))
    assert head.num_whole == 1
    for value, same in zip(choose_with_confidence(lazy, draws_of(lazy)), want, strict=True):
        assert torch.equal(value, same)


@pytest.mark.parametrize("extra", EXTRAS)
def test_whatever_else_a_row_wants_reads_all_logits_once(extra: str, seed: int) -> None:
    torch.manual_seed(seed)
    odd = Row(temperature=0.7, seed=seed, suppress=(5,), **{extra: EXTRAS[extra]})
    lazy, known, head = both_ways([Row(), odd])
    got = choose_with_confidence(lazy, draws_of(lazy))
    assert head.num_whole == 1
    assert_equal(got, choose_with_confidence(known, draws_of(known)))
    # The probability is that of the raw logits, whatever chose, but for ids that may not be chosen.
    allowed = known.logits_NV.index_fill(1, torch.tensor(BANNED), -torch.inf)
    if extra == "min_tokens":
        allowed[1, 5] = -torch.inf
    raw = allowed.softmax(dim=1)
    torch.testing.assert_close(got.probs, raw.gather(1, got.token_ids[:, None])[:, 0])


def test_log_probabilities_read_all_logits_once() -> None:
    lazy, known, head = both_ways([Row(), Row()], logprobs=3)
    chosen = choose_with_confidence(lazy, draws_of(lazy)).token_ids
    scores, wanted = token_logprobs(lazy, chosen), token_logprobs(known, chosen)
    assert head.num_whole == 1
    assert scores is not None
    assert wanted is not None
    assert scores.ids.tolist() == wanted.ids.tolist()


def test_a_head_that_is_more_than_a_product_is_asked_for_its_logits() -> None:
    lazy, known, head = both_ways([Row()] * 5, is_product=False)
    got = choose_with_confidence(lazy, draws_of(lazy))
    assert head.num_whole == 1
    assert_equal(got, choose_with_confidence(known, draws_of(known)))


def test_known_logits_are_read_as_they_are() -> None:
    logits = torch.randn(2, 5)
    known = KnownLogits(logits)
    assert known.whole() is logits
    assert known.factors() is None


def some_final(batch: DecideBatch, rng: random.Random, num_padding: int) -> torch.Tensor:
    """[N] bool, in the tables too; padding comes last and counts as open there."""
    final = torch.tensor([rng.random() < 0.6 for _ in batch.rows])
    final[len(final) - num_padding :] = False
    batch.tables.fixed[batch.rows, batch.positions] = final
    return final


ROWS = 34
KINDS = {
    "greedy": [Row()],
    "hot": [Row(), Row(temperature=1.5, seed=3)],
    "filtered": [Row(temperature=0.7, seed=4, top_k=5), Row(temperature=1.0, top_p=0.8)],
}


@pytest.mark.parametrize("step", [None, 1, 16], ids=["torch", "kernels", "kernels of sizes"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("slack", [0, 7])
def test_final_positions_are_left_out_of_the_head(
    kind: str, slack: int, step: int | None, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever was final when the bound was made, and is by now; of what is multiplied already all
    is chosen. Kernels are interpreted."""
    if step is not None:
        monkeypatch.setattr(sampler, "runs_triton", lambda _: True)
        monkeypatch.setattr(sampler, "_OPEN_STEP", step)
    torch.manual_seed(seed)
    rng, num_padding = random.Random(seed), 6
    lazy, known, head = both_ways((KINDS[kind] * ROWS)[:ROWS])
    is_open = ~some_final(lazy, rng, num_padding)
    is_open[len(is_open) - num_padding :] = False
    bound = min(ROWS - 1, int(is_open.sum()) + slack)
    size = min(ROWS, -(-bound // (step or 1)) * (step or 1))
    for batch, num_chosen in ((lazy, size), (known, ROWS)):
        few = dataclasses.replace(batch, num_open=bound)
        few.tables.fixed[:] = lazy.tables.fixed
        got, want = (choose_with_confidence(one, draws_of(one)) for one in (few, batch))
        assert_equal(*(Confidence(*(one[is_open] for one in each)) for each in (got, want)))
        assert (got.probs != 0).sum() == num_chosen
    assert head.rows == [size, ROWS]


def test_all_of_them_may_be_final(seed: int) -> None:
    """As where a prompt pins a whole block."""
    lazy, _, head = both_ways([Row()] * 5)
    lazy.tables.fixed[:] = True
    got = choose_with_confidence(dataclasses.replace(lazy, num_open=0), draws_of(lazy))
    assert head.rows == [1]
    assert len(got.probs) == 5


def test_control_too_low_a_bound_loses_an_open_position() -> None:
    lazy, _, _ = both_ways([Row()] * 5)
    got = choose_with_confidence(dataclasses.replace(lazy, num_open=4), draws_of(lazy))
    assert [bool(one) for one in got.probs] == [True] * 4 + [False]


def test_log_probabilities_are_those_of_every_position() -> None:
    lazy, _, head = both_ways([Row()] * 5, logprobs=2)
    few = dataclasses.replace(lazy, num_open=2)
    assert (choose_with_confidence(few, draws_of(few)).probs > 0).all()
    assert head.rows == [5]


class End(Head):
    """A last layer that adds, and notes to how many rows."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__(weight)
        self.finished: list[int] = []

    def finish(self, hidden: torch.Tensor, mixed: torch.Tensor) -> None:
        self.finished.append(len(hidden))
        hidden += mixed

    def own_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.logits(hidden)


def test_a_last_layer_ends_once_for_what_is_asked() -> None:
    """Whatever is asked, and in whatever order: of all positions, or of a few of them."""
    torch.manual_seed(0)
    hidden, mixed = torch.randint(-3, 4, (2, 9, 16)).float()
    end = End(torch.randint(-3, 4, (VOCAB, 16)).float())
    want = functional.linear(hidden + mixed, end.weight)
    places = torch.tensor([7, 0, 4])

    def left() -> UnfinishedLogits:
        end.finished.clear()
        return UnfinishedLogits(end, hidden.clone(), mixed)

    few = left().at(places)
    assert end.finished == []
    x, weight = few.factors() or (hidden, hidden)
    assert torch.equal(functional.linear(x, weight), want[places])
    assert torch.equal(few.whole(), want[places])
    assert end.finished == [3]
    every = left()
    assert torch.equal(every.whole(), want)
    assert torch.equal(every.own(), want)
    assert torch.equal(every.at(places).whole(), want[places])
    assert end.finished == [9]
    twice = left().at(places).at(torch.tensor([2, 1]))
    assert torch.equal(twice.whole(), want[[4, 0]])
    assert end.finished == [2]

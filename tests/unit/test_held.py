"""Ids that do not count in how sure a choice is, against the softmax without them."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from engine_service.decoding.reveal import RevealTables
from engine_service.decoding.reveal_knobs import RevealKnobs
from engine_service.sampling.batch import DecideBatch
from engine_service.sampling.held import HeldIds
from engine_service.sampling.sampler import choose, choose_with_confidence, token_logprobs
from tests.sampling_batches import Row, make_batch

VOCAB, BANNED, EOS, EOT = 24, 3, (5, 9), (11,)
IDS = torch.tensor([*EOS, *EOT])


def random_batch(seed: int, count: int, dtype: torch.dtype) -> DecideBatch:
    """Greedy rows and drawn ones, some of which are too short to end."""
    rng, draw = random.Random(seed), torch.Generator().manual_seed(seed)
    rows = [
        Row(
            temperature=rng.choice([0.0, 1.0]),
            seed=rng.getrandbits(40),
            min_tokens=rng.choice([0, 0, 9]),
            suppress=(0, EOS[0], 7)[: rng.randint(1, 3)],
        )
        for _ in range(count)
    ]
    logits = 2 * torch.randn(count, VOCAB, generator=draw)
    # Ends are likely.
    logits[:, IDS] += 2
    return make_batch(logits.to(dtype), rows, banned=(BANNED,))


def out_of(batch: DecideBatch, index: int, *, holds: bool, late: tuple[int, ...]) -> set[int]:
    """Ids that do not count at a row's position."""
    tables = batch.tables
    out = {BANNED}
    if batch.positions[index] - tables.prompt_lens[index] < tables.min_tokens[index]:
        out |= {one for one in tables.suppress_ids[index].tolist() if one >= 0}
    if holds:
        out |= set(late) if tables.temperature[index] > 0 else {*EOS, *EOT}
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_how_sure_a_choice_is_leaves_them_out(dtype: torch.dtype, seed: int) -> None:
    batch = random_batch(seed, 200, dtype)
    holds = torch.arange(200) % 2 == 0
    batch = replace(batch, wants=replace(batch.wants, holds_ends=True))
    before, draws = batch.logits_NV.clone(), torch.arange(200)
    held = HeldIds(IDS, holds, torch.isin(IDS, torch.tensor(EOT)))
    got = choose_with_confidence(batch, draws, held)
    assert torch.equal(batch.logits_NV, before), "they are read again"
    assert torch.equal(got.token_ids, choose(batch, draws)), "they can still be chosen"
    num_zero = 0
    for index, token in enumerate(got.token_ids.tolist()):
        out = out_of(batch, index, holds=bool(holds[index]), late=EOT)
        line = before[index].to(got.probs.dtype)
        line[list(out)] = -torch.inf
        probs = line.softmax(0)
        best = probs.topk(2).values
        assert got.probs[index].item() == pytest.approx(probs[token].item(), rel=1e-5)
        assert got.margin[index].item() == pytest.approx((best[0] - best[1]).item(), abs=1e-5)
        entropy = -torch.xlogy(probs, probs).sum().item()
        assert got.entropy[index].item() == pytest.approx(entropy, abs=1e-4)
        assert bool(held.chosen(batch, got.token_ids)[index]) == (holds[index] and token in out)
        num_zero += token in out
    assert num_zero > 2, "the control: some choices were held back"


@pytest.mark.parametrize("eot", [EOT, ()])
def test_rows_reveal_what_ends_an_answer_last(eot: tuple[int, ...], seed: int) -> None:
    """One position a step: where tokens are drawn only the end of a turn waits, or all ends of a
    model that does not tell it apart."""
    count = 80
    batch = random_batch(seed, count, torch.float32)
    rng = random.Random(seed)
    holds = [rng.random() < 0.7 for _ in range(count)]
    # Pairs of rows become spans of one row each: row r decides positions 2r and 2r + 1.
    rows = torch.arange(count // 2).repeat_interleave(2)
    positions = torch.tensor([1, 2] * (count // 2))
    spans = torch.arange(count // 2)
    cu = torch.arange(0, count + 1, 2)
    batch = replace(batch, rows=rows, positions=positions, span_rows=spans, cu_decide=cu)
    batch = replace(batch, wants=replace(batch.wants, holds_ends=True, suppress=False))
    tables = RevealTables(count - 1, torch.device("cpu"), mask_token_id=BANNED, ends=(EOS, eot))
    batch.tables.tokens[:, 1:] = BANNED
    knobs = [RevealKnobs(remasking="low_confidence", steps=2, eos_last=one) for one in holds]
    tables.admit(
        range(count),
        knobs,
        steps_taken=[0] * count,
        block_starts=[1] * count,
        origins=[1] * count,
        blocks=[2] * count,
    )
    final = tables.decide(batch, width=2).final
    chosen = choose(batch, torch.zeros(count, dtype=torch.int64)).tolist()
    num_held = 0
    for row in range(count // 2):
        ends = {*EOS, *eot}
        if batch.tables.temperature[row] > 0:
            ends = set(eot or EOS)
        sure = []
        for place in (2 * row, 2 * row + 1):
            line = batch.logits_NV[place].double()
            line[[BANNED, *(ends if holds[row] else ())]] = -torch.inf
            sure.append(line.softmax(0)[chosen[place]].item())
            num_held += sure[-1] == 0
        first = 0 if sure[0] >= sure[1] else 1
        assert final[2 * row : 2 * row + 2].tolist() == [first == 0, first == 1]
    assert num_held > 0, "the control: some choices were held back"


@pytest.mark.parametrize("last", [True, False])
def test_no_edit_writes_what_is_held_back(last: bool) -> None:
    """Row 0 has chosen 1, and would now choose an end; row 1 another token."""
    logits = torch.zeros(2, VOCAB)
    logits[0, EOS[0]] = logits[1, 2] = 9.0
    batch = make_batch(logits, [Row(tokens=[0, 1])] * 2, banned=(BANNED,), positions=[1, 1])
    batch = replace(batch, wants=replace(batch.wants, holds_ends=last))
    tables = RevealTables(1, torch.device("cpu"), mask_token_id=BANNED, ends=(EOS, EOT))
    knobs = RevealKnobs(remasking="threshold", steps=1, eos_last=last, edit_threshold=0.5)
    at: dict[str, list[int]] = {"steps_taken": [0, 0], "block_starts": [1, 1], "origins": [1, 1]}
    tables.admit([0, 1], [knobs, knobs], blocks=[1, 1], **at)
    assert tables.decide(batch, width=1).token_ids.tolist() == [1 if last else EOS[0], 2]


def test_log_probabilities_are_those_of_all_ids(seed: int) -> None:
    batch = random_batch(seed, 6, torch.float32)
    batch = replace(batch, wants=replace(batch.wants, holds_ends=True, max_logprobs=2))
    held = HeldIds(IDS, torch.ones(6, dtype=torch.bool), torch.ones(3, dtype=torch.bool))
    want = token_logprobs(batch, torch.full((6,), EOS[0]))
    choose_with_confidence(batch, torch.zeros(6, dtype=torch.int64), held)
    got = token_logprobs(batch, torch.full((6,), EOS[0]))
    assert want is not None
    assert got is not None
    assert torch.equal(got.logprobs, want.logprobs)
    assert got.logprobs.isfinite().all()

"""What is kept of a verified draft: against the paper's loop, position by position, and by law."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from engine_service.decoding.verifier import Draft, accepted
from engine_service.sampling.batch import DecideBatch
from engine_service.sampling.head import KnownLogits
from engine_service.sampling.sampler import choose
from tests.equivalence.apd_reference import Knobs, noise_at, num_accepted
from tests.sampling_batches import Row, make_tables, make_wants

VOCAB, MASK, LENGTH = 12, 11, 40
WEIGHTS = [number / 10 for number in range(1, 10)]
TEMPERATURES = [0.0, 0.2, 1.0]


@dataclass
class Case:
    """Spans of several rows, drafted; padding behind them as CUDA graphs have it."""

    batch: DecideBatch
    draft: Draft
    causal: torch.Tensor
    weight: torch.Tensor
    knobs: list[Knobs]
    """One per row, spans in the order of rows."""

    def kept(self) -> torch.Tensor:
        return accepted(self.batch, self.draft, self.causal, self.weight)

    def spans(self) -> list[slice]:
        ends = self.batch.cu_decide.tolist()
        return [slice(*pair) for pair in pairwise(ends)][: len(self.knobs)]


def random_knobs(rng: random.Random, seed: int, weights: list[float]) -> Knobs:
    return Knobs(
        weight=rng.choice(weights),
        temperature=rng.choice(TEMPERATURES),
        seed=seed,
        banned=(MASK,),
        bias={rng.randrange(VOCAB - 1): rng.uniform(-3, 3) for _ in range(rng.randint(0, 2))},
        top_k=rng.choice([0, 0, 0, 3]),
    )


def random_case(
    seed: int,
    *,
    weights: list[float] = WEIGHTS,
    pinned: float = 0.2,
    dtype: torch.dtype = torch.float64,
) -> Case:
    """Eight rows whose two models agree more or less; `pinned` of the positions are given."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    knobs = [random_knobs(rng, rng.getrandbits(60), weights) for _ in range(8)]
    lengths = [rng.randint(1, 9) for _ in knobs]
    starts = [rng.randint(1, LENGTH - 9) for _ in knobs]
    spare = rng.choice([0, 5])
    total = sum(lengths) + spare
    rows = [row for row, length in enumerate(lengths) for _ in range(length)]
    positions = [s + i for s, length in zip(starts, lengths, strict=True) for i in range(length)]
    ends = torch.tensor(lengths).cumsum(0).tolist()
    lines = [Row(temperature=k.temperature, seed=k.seed, bias=k.bias, top_k=k.top_k) for k in knobs]
    tables = make_tables([*lines, Row()], banned=(MASK,), width=LENGTH)
    tables.tokens[:] = MASK
    marginal = torch.randn(total, VOCAB, generator=generator, dtype=dtype) * 2
    apart = torch.randn(total, VOCAB, generator=generator, dtype=dtype) * rng.choice([0.3, 1, 3])
    batch = DecideBatch(
        logits=KnownLogits(marginal),
        rows=torch.tensor(rows + [len(knobs)] * spare),
        positions=torch.tensor(positions + [0] * spare),
        span_rows=torch.tensor([*range(len(knobs)), len(knobs), len(knobs)]),
        cu_decide=torch.tensor([0, *ends, ends[-1], total]),
        tables=tables,
        wants=make_wants(lines),
    )
    draws = torch.tensor([rng.randint(0, 4) for _ in range(len(knobs) + 1)])[batch.rows]
    is_open = torch.tensor([rng.random() >= pinned for _ in range(total)])
    chosen = choose(batch, draws)
    draft = Draft(
        token_ids=torch.where(is_open, chosen, rng.randrange(VOCAB)), is_open=is_open, draws=draws
    )
    weight = torch.tensor([*(k.weight for k in knobs), 0.5, 0.5], dtype=torch.float64)
    return Case(batch, draft, marginal + apart, weight, knobs)


def kept_slowly(case: Case) -> list[list[bool]]:
    """Per span, by the paper's loop."""
    found = []
    for span, knobs in zip(case.spans(), case.knobs, strict=True):
        places = [i for i in range(span.start, span.stop) if case.draft.is_open[i]]
        positions, draws = case.batch.positions.tolist(), case.draft.draws.tolist()
        kept = num_accepted(
            [int(case.draft.token_ids[i]) for i in places],
            [case.batch.logits_NV[i].tolist() for i in places],
            [case.causal[i].tolist() for i in places],
            [noise_at(knobs, positions[i], draws[i], VOCAB) for i in places],
            knobs,
        )
        found.append([i in places[:kept] for i in range(span.start, span.stop)])
    return found


def num_wrong(seeds: range, spoil: Callable[[Case], Case] = lambda case: case) -> int:
    """Spans in which what is kept is not what the loop keeps, with the fast path's case spoilt."""
    wrong = 0
    for seed in seeds:
        case = random_case(seed)
        got = spoil(case).kept()
        pairs = zip(case.spans(), kept_slowly(case), strict=True)
        wrong += sum(got[span].tolist() != want for span, want in pairs)
    return wrong


def test_what_is_kept_is_what_the_paper_keeps(seed: int) -> None:
    seeds = range(seed, seed + 30)
    assert num_wrong(seeds) == 0
    cases = [random_case(one) for one in seeds]
    partial = full = 0
    for case in cases:
        got = case.kept()
        for span in case.spans():
            num_open, num_kept = int(case.draft.is_open[span].sum()), int(got[span].sum())
            assert num_kept >= min(1, num_open)
            full += 1 < num_kept == num_open
            partial += 1 < num_kept < num_open
    assert full > 20
    assert partial > 20


def other_noise(case: Case) -> Case:
    return replace(case, draft=replace(case.draft, draws=case.draft.draws + 1))


def other_positions(case: Case) -> Case:
    return replace(case, batch=replace(case.batch, positions=case.batch.positions + 1))


def argmax_as_target(case: Case) -> Case:
    """The authors' code: noise in the draft alone."""
    tables = replace(case.batch.tables, temperature=torch.zeros(len(case.knobs) + 1))
    return replace(case, batch=replace(case.batch, tables=tables))


def temperature_twice(case: Case) -> Case:
    temperature = case.batch.tables.temperature
    tables = replace(case.batch.tables, temperature=temperature * temperature)
    return replace(case, batch=replace(case.batch, tables=tables))


def weights_exchanged(case: Case) -> Case:
    return replace(case, weight=1 - case.weight)


def one_span(case: Case) -> Case:
    """Nothing says where a row ends: what differs in one of them ends the next ones too."""
    total = len(case.batch.positions)
    batch = replace(case.batch, cu_decide=torch.tensor([0] + [total] * len(case.weight)))
    return replace(case, batch=batch)


@pytest.mark.parametrize(
    "spoil",
    [
        other_noise,
        other_positions,
        argmax_as_target,
        temperature_twice,
        weights_exchanged,
        one_span,
    ],
)
def test_the_comparison_sees_what_is_wrong(spoil: Callable[[Case], Case]) -> None:
    assert num_wrong(range(15), spoil) > 3


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_with_all_the_weight_everything_is_kept(dtype: torch.dtype, seed: int) -> None:
    """Whatever the verifier says, and only with the noise of the draft."""
    generator, spoilt = torch.Generator().manual_seed(seed), 0
    for one in range(seed, seed + 20):
        case = random_case(one, weights=[1.0], dtype=dtype)
        case.weight[:] = 1
        case.causal[torch.rand(case.causal.shape, generator=generator) < 0.3] = -torch.inf
        assert torch.equal(case.kept(), case.draft.is_open)
        spoilt += not torch.equal(other_noise(case).kept(), case.draft.is_open)
    assert spoilt > 10


def test_without_weight_the_verifiers_own_samples_decide(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for one in range(seed, seed + 30):
        case = random_case(one, weights=[0.0], pinned=0.0)
        ruled_out = torch.rand(case.causal.shape, generator=generator) < 0.3
        case.batch.logits_NV.masked_fill_(ruled_out, -torch.inf)
        alone = choose(replace(case.batch, logits=KnownLogits(case.causal)), case.draft.draws)
        agrees, got = alone == case.draft.token_ids, case.kept()
        for span in case.spans():
            own = agrees[span].tolist()
            own[0] = True
            length = own.index(False) if False in own else len(own)
            assert got[span].tolist() == [True] * length + [False] * (len(own) - length)


def test_an_equal_verifier_keeps_everything(seed: int) -> None:
    for one in range(seed, seed + 20):
        case = random_case(one)
        case.causal = case.batch.logits_NV.clone()
        assert torch.equal(case.kept(), case.draft.is_open)


def test_the_first_token_is_kept_even_where_it_is_ruled_out(seed: int) -> None:
    """And nothing behind it: the verifier lacks every drafted id."""
    case = random_case(seed)
    case.causal.scatter_(1, case.draft.token_ids[:, None], -torch.inf)
    for span in case.spans():
        is_open = case.draft.is_open[span].tolist()
        first = is_open.index(True) if True in is_open else None
        assert case.kept()[span].tolist() == [i == first for i in range(len(is_open))]


def test_the_mask_token_is_no_target(seed: int) -> None:
    """A verifier for which it is an ordinary token may like it best."""
    case = random_case(seed, weights=[0.0])
    before = case.kept()
    case.causal[:, MASK] = 100.0
    assert torch.equal(case.kept(), before)


def test_more_weight_keeps_more(seed: int) -> None:
    kept = []
    for weight in (0.1, 0.5, 0.9):
        cases = [random_case(one, weights=[weight]) for one in range(seed, seed + 60)]
        kept.append(sum(int(case.kept().sum()) for case in cases))
    assert kept[0] < kept[1] < kept[2]


def test_a_row_does_not_depend_on_its_batch(seed: int) -> None:
    case = random_case(seed)
    together = case.kept()
    for row, span in enumerate(case.spans()):
        batch = replace(
            case.batch,
            logits=KnownLogits(case.batch.logits_NV[span]),
            rows=case.batch.rows[span],
            positions=case.batch.positions[span],
            span_rows=case.batch.span_rows[row : row + 1],
            cu_decide=torch.tensor([0, span.stop - span.start]),
        )
        own = case.draft
        draft = Draft(
            token_ids=own.token_ids[span], is_open=own.is_open[span], draws=own.draws[span]
        )
        alone = accepted(batch, draft, case.causal[span], case.weight[row : row + 1])
        assert torch.equal(alone, together[span])


def test_nothing_is_read_back_from_the_device(seed: int) -> None:
    """On tensors without values, where looking at one fails."""
    case = random_case(seed)
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        columns = ("rows", "positions", "span_rows", "cu_decide")
        names = case.batch.tables.__dataclass_fields__
        given = {name: getattr(case.batch.tables, name) for name in names}
        tables = {name: mode.from_tensor(one) for name, one in given.items() if one is not None}
        batch = replace(
            case.batch,
            **{name: mode.from_tensor(getattr(case.batch, name)) for name in columns},
            logits=KnownLogits(mode.from_tensor(case.batch.logits_NV)),
            tables=replace(case.batch.tables, **tables),
        )
        own = case.draft
        draft = Draft(
            token_ids=mode.from_tensor(own.token_ids),
            is_open=mode.from_tensor(own.is_open),
            draws=mode.from_tensor(own.draws),
        )
        causal, weight = mode.from_tensor(case.causal), mode.from_tensor(case.weight)
        kept = accepted(batch, draft, causal, weight)
        assert (kept.shape, kept.dtype) == (own.is_open.shape, torch.bool)
        with pytest.raises(DataDependentOutputException):
            bool(kept.any())

"""The drawing kernels against the plain sampler: the same tokens, the same probabilities."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from engine_service.kernels.jit import INTERPRETED, jit, tl
from engine_service.kernels.sampling import draw_tokens_triton
from engine_service.kernels.streams import Streams
from engine_service.kernels.vocab_tiles import TILE, draw_key, gumbel_noise
from engine_service.sampling.head import KnownLogits
from engine_service.sampling.rng import Purpose, draw_keys, gumbel
from engine_service.sampling.sampler import choose, choose_on_device
from tests.sampling_batches import Row, make_batch, on_device

device = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = [1, 2, 31, TILE, TILE + 1, 2 * TILE + 333]
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


@jit
def _noise_kernel(
    seed_ptr: tl.tensor,
    position_ptr: tl.tensor,
    draw_ptr: tl.tensor,
    key_ptr: tl.tensor,
    noise_ptr: tl.tensor,
    HARDWARE_LOG: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    n = tl.program_id(0)
    position, draw = tl.load(position_ptr + n), tl.load(draw_ptr + n)
    key = draw_key(tl.load(seed_ptr + n), position, draw, 1)
    ids = tl.arange(0, BLOCK)
    tl.store(key_ptr + n, key.to(tl.int64))
    tl.store(noise_ptr + n * BLOCK + ids, gumbel_noise(ids, key, HARDWARE_LOG))


def draw(logits: torch.Tensor, batch, draws: torch.Tensor) -> torch.Tensor:
    there = on_device(batch, device)
    tables = there.tables
    streams = Streams(
        there.rows, there.positions, draws.to(device), tables.temperature, tables.seeds,
        Purpose.TOKEN,
    )  # fmt: skip
    return draw_tokens_triton(logits.to(device), streams, tables.banned_ids)


def random_rows(rng: random.Random, count: int) -> list[Row]:
    return [
        Row(temperature=rng.choice([0.0, 0.3, 1.0, 1.7]), seed=rng.getrandbits(64))
        for _ in range(count)
    ]


def test_keys_are_equal_and_noise_up_to_the_logarithm(seed: int) -> None:
    torch.manual_seed(seed)
    count, size = 5, 4096
    seeds = torch.randint(-(2**63), 2**63 - 1, (count,))
    positions, draws = torch.tensor([0, 1, 7, 100_000, 2**31]), torch.tensor([0, 1, 2, 15, 31])
    keys = torch.empty(count, dtype=torch.int64, device=device)
    noise = torch.empty(count, size, device=device)
    _noise_kernel[(count,)](
        seeds.to(device), positions.to(device), draws.to(device), keys, noise,
        HARDWARE_LOG=not INTERPRETED, BLOCK=size,
    )  # fmt: skip
    want = draw_keys(seeds, Purpose.REMASK, positions, draws)
    assert torch.equal(keys.cpu(), want)
    exact = gumbel(want, torch.arange(size), torch.float64)
    # Half a unit in the last place of a uniform near 1 moves the noise of a loser by up to 4e-3.
    close = gumbel(want, torch.arange(size)).double()
    torch.testing.assert_close(noise.cpu().double(), close, rtol=0, atol=6e-6)
    winners = exact > 1
    torch.testing.assert_close(noise.cpu().double()[winners], exact[winners], rtol=0, atol=6e-6)
    assert not torch.allclose(noise.cpu().double(), close.roll(1, dims=1), atol=0.1)


@dtypes
@pytest.mark.parametrize("vocab", SIZES)
def test_tokens_are_those_of_the_plain_sampler(vocab: int, dtype: torch.dtype, seed: int) -> None:
    torch.manual_seed(seed)
    rng = random.Random(seed)
    rows = random_rows(rng, 6)
    banned = tuple({rng.randrange(vocab), rng.randrange(vocab)}) if vocab > 2 else ()
    logits = (torch.randn(6, vocab) * 3).to(dtype)
    batch = make_batch(logits, rows, banned=banned)
    draws = torch.arange(6)
    want = choose(batch, draws)
    got = draw(logits, batch, draws)
    assert got.tolist() == want.tolist()
    assert not set(got.tolist()) & set(banned)


def test_another_draw_gives_other_tokens(seed: int) -> None:
    logits = torch.zeros(8, 3000)
    batch = make_batch(logits, [Row(temperature=1.0, seed=seed)] * 8)
    first = draw(logits, batch, torch.arange(8))
    second = draw(logits, batch, torch.arange(8) + 8)
    assert len(torch.cat((first, second)).unique()) > 12


def test_the_lowest_of_equals_wins() -> None:
    logits = torch.full((4, 2 * TILE + 5), -3.0)
    for row, places in enumerate([[17, 4], [TILE, 2 * TILE + 4], [TILE - 1, TILE], []]):
        logits[row, places] = 2.0
    batch = make_batch(logits, [Row()] * 4)
    assert draw(logits, batch, torch.zeros(4).long()).tolist() == [4, TILE, TILE - 1, 0]


@pytest.mark.filterwarnings("ignore:invalid value", "ignore:All-NaN")
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("vocab", [5, TILE + 7])
def test_what_is_no_number_never_wins_and_ids_stay_in_range(vocab: int, temperature: float) -> None:
    nan, never = float("nan"), float("-inf")
    logits = torch.full((5, vocab), never)
    logits[0] = nan
    logits[1, ::2] = nan
    logits[2] = nan
    logits[2, vocab - 2] = -5.0
    logits[3, 3] = float("inf")
    batch = make_batch(logits, [Row(temperature=temperature)] * 5)
    tokens = draw(logits, batch, torch.zeros(5).long()).tolist()
    assert all(0 <= token < vocab for token in tokens)
    assert tokens[2:] == [vocab - 2, 3, 0]


def test_rows_may_lie_apart_and_share_a_line(seed: int) -> None:
    torch.manual_seed(seed)
    wide = torch.randn(4, 700)
    logits = wide[:, 100:400]
    rows = [Row(temperature=1.0, seed=seed), Row()]
    batch = make_batch(logits[:2], rows)
    batch = dataclasses.replace(
        batch,
        rows=torch.tensor([1, 0, 0, 1]),
        positions=torch.arange(4),
        logits=KnownLogits(logits),
    )
    draws = torch.zeros(4).long()
    there = wide.to(device)[:, 100:400]
    assert draw(there, batch, draws).tolist() == choose(batch, draws).tolist()


def everything(rng: random.Random, vocab: int) -> Row:
    tokens = [rng.randrange(vocab) for _ in range(rng.randint(1, 16))]
    return Row(
        tokens=tokens,
        prompt_len=rng.randint(1, len(tokens)),
        temperature=rng.choice([0.0, 0.5, 1.3]),
        top_p=rng.choice([1.0, 0.87, 0.31]),
        top_k=rng.choice([0, 1, 3, 40]),
        min_p=rng.choice([0.0, 0.07]),
        repetition_penalty=rng.choice([1.0, 1.5, 0.7]),
        presence_penalty=rng.choice([0.0, 1.2]),
        frequency_penalty=rng.choice([0.0, 0.6]),
        seed=rng.getrandbits(64),
        min_tokens=rng.choice([0, 20]),
        suppress=tuple(rng.sample(range(vocab), 2)),
        bias={rng.randrange(vocab): rng.uniform(-3, 9) for _ in range(rng.randint(0, 11))},
    )


@dtypes
def test_everything_together_chooses_as_the_plain_sampler(dtype: torch.dtype, seed: int) -> None:
    torch.manual_seed(seed)
    rng = random.Random(seed)
    logits = (torch.randn(12, 300) * 2).to(dtype)
    rows = [everything(rng, 300) for _ in range(12)]
    batch = make_batch(logits, rows, banned=(4, 299))
    plain = dataclasses.replace(batch.wants, penalties=False, bias=False, suppress=False)
    for wants in (
        batch.wants,
        plain,
        dataclasses.replace(plain, filters=False),
        dataclasses.replace(batch.wants, filters=False, penalties=False),
    ):
        part = dataclasses.replace(batch, wants=wants)
        want = choose(part, torch.arange(12))
        got = choose_on_device(on_device(part, device), torch.arange(12).to(device))
        assert got.tolist() == want.tolist(), wants

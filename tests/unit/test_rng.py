"""The stateless random numbers: equal to plain Python, uniform, and independent of each other."""

from __future__ import annotations

import math
import random

import pytest
import torch

from engine_service.sampling.rng import (
    Purpose,
    draw_keys,
    gumbel,
    mix,
    mix_word,
    request_seed,
    scramble,
    uniform,
)

MASK, MASK32 = (1 << 64) - 1, (1 << 32) - 1
GOLDEN = 0x9E3779B97F4A7C15


def splitmix64(word: int) -> int:
    """The published function, next to its seed constant, on unbounded Python integers."""
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & MASK
    return word ^ (word >> 31)


def key_of(seed: int, purpose: int, position: int, draw: int) -> int:
    first, second = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
    return splitmix64((seed + position * GOLDEN + draw * first + (purpose + 1) * second) & MASK)


def permute(word: int) -> int:
    """The published 32-bit permutation: xor-shift 16, product, 15, product, 15."""
    word = ((word ^ (word >> 16)) * 0x21F0AAAD) & MASK32
    word = ((word ^ (word >> 15)) * 0xD35A2D97) & MASK32
    return word ^ (word >> 15)


def unit_of(key: int, index: int) -> float:
    return (permute(permute(index ^ (key & MASK32)) ^ (key >> 32)) + 0.5) * 2.0**-32


def test_splitmix64_has_the_published_values():
    # First outputs of the reference implementation for seed 1234567.
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [splitmix64((1234567 + n * GOLDEN) & MASK) for n in (1, 2, 3)] == published


def test_mix_equals_python_on_random_words():
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    words = [random.Random(seed).getrandbits(64) for _ in range(500)] + [0, MASK, 1 << 63]
    signed = torch.tensor([word - (1 << 64) if word >> 63 else word for word in words])
    assert [word & MASK for word in mix(signed).tolist()] == [splitmix64(word) for word in words]
    assert [mix_word(word) for word in words] == [splitmix64(word) for word in words]


def test_uniform_equals_python():
    seeds = torch.tensor([0, -5, 2**63 - 1])
    positions, draws = torch.tensor([0, 7, 100_000]), torch.tensor([0, 3, 15])
    keys = draw_keys(seeds, Purpose.REMASK, positions, draws)
    got = uniform(keys, torch.tensor([0, 1, 151_000]), torch.float64)
    rows = zip(seeds.tolist(), positions.tolist(), draws.tolist(), strict=True)
    expected = [
        [unit_of(key_of(seed & MASK, 1, place, draw), index) for index in (0, 1, 151_000)]
        for seed, place, draw in rows
    ]
    assert got.tolist() == expected


def test_request_seed_separates_choices_and_fits_int64():
    seeds = {request_seed(seed, choice) for seed in (0, 1, 2**64 - 1) for choice in range(100)}
    assert len(seeds) == 300
    torch.tensor(list(seeds), dtype=torch.int64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_uniform_is_uniform_and_open(dtype):
    keys = draw_keys(
        torch.arange(100), Purpose.TOKEN, torch.zeros(100).long(), torch.zeros(100).long()
    )
    unit = uniform(keys, torch.arange(2000), dtype)
    assert unit.min() > 0
    assert unit.max() < 1
    counts = torch.histc(unit.double(), 100, 0, 1)
    chi_square = ((counts - 2000) ** 2 / 2000).sum().item()
    assert chi_square < 160  # 99 degrees of freedom: beyond the 99.99 % point


def inverse(word: int) -> int:
    """The index and key halves 0 whose word is `word`: the permutation run backwards, twice."""
    for _ in range(2):
        word ^= word >> 15 ^ word >> 30
        word = word * pow(0xD35A2D97, -1, 1 << 32) & MASK32
        word ^= word >> 15 ^ word >> 30
        word = word * pow(0x21F0AAAD, -1, 1 << 32) & MASK32
        word ^= word >> 16
    return word


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_words_stay_inside_and_finite(dtype):
    indices = torch.tensor([inverse(word) for word in (0, 1, 1 << 31, MASK32)])
    unit = uniform(torch.tensor([0]), indices, dtype)[0]
    assert unit[:2].tolist() == [2.0**-33, 3 * 2.0**-33]
    assert 0.5 <= unit[2] < unit[3] < 1
    noise = gumbel(torch.tensor([0]), indices, dtype)[0]
    assert torch.isfinite(noise).all()
    assert noise[0].item() == pytest.approx(33 * math.log(2), abs=1e-5)
    assert noise.argmax() == 0


def test_permutation_equals_python_and_loses_nothing(seed):
    words = [random.Random(seed).getrandbits(32) for _ in range(500)] + [0, MASK32, 1 << 31]
    signed = torch.tensor([word - (1 << 32) if word >> 31 else word for word in words])
    got = scramble(signed.to(torch.int32)).tolist()
    assert [word & MASK32 for word in got] == [permute(word) for word in words]
    every = scramble(torch.arange(1 << 20, dtype=torch.int32))
    assert len(every.unique()) == 1 << 20


def test_every_bit_of_the_key_and_of_the_index_changes_half_of_the_bits(seed):
    """Flipping one input bit flips each output bit with probability 1/2."""
    torch.manual_seed(seed)
    keys = torch.randint(-(2**63), 2**63 - 1, (4000,))
    index = torch.tensor([12_345])
    words = (uniform(keys, index, torch.float64) * 2**32).long()[:, 0]
    places = torch.arange(32)
    for bit in range(64 + 17):
        key_bit = torch.tensor(1).bitwise_left_shift(torch.tensor(min(bit, 63)))
        other = uniform(
            keys ^ key_bit if bit < 64 else keys,
            index if bit < 64 else index ^ (1 << (bit - 64)),
            torch.float64,
        )
        changed = (words ^ (other * 2**32).long()[:, 0])[:, None] >> places & 1
        rate = changed.double().mean(dim=0)
        assert (rate - 0.5).abs().max() < 0.06, bit  # standard deviation 0.008


def test_words_of_neighbouring_streams_and_indices_are_independent(seed):
    """Pairs fall into 16 x 16 cells as often as they should: neighbouring ids and positions, high
    bits and low ones."""
    positions = torch.arange(64)
    seeds = torch.full((64,), request_seed(seed, 0))
    keys = draw_keys(seeds, Purpose.TOKEN, positions, torch.zeros_like(positions))
    words = (uniform(keys, torch.arange(4096), torch.float64) * 2**32).long()
    for shift in (28, 14, 0):
        cell = words >> shift & 15
        pairs = [(cell[:, lag:], cell[:, :-lag]) for lag in (1, 2, 3, 4, 8, 64, 1024)]
        pairs += [(cell[1:], cell[:-1]), (cell[32:], cell[:32]), (cell[1:, 1:], cell[:-1, :-1])]
        for number, (left, right) in enumerate(pairs):
            counts = torch.bincount((left * 16 + right).flatten(), minlength=256).double()
            expected = counts.sum() / 256
            chi_square = ((counts - expected) ** 2 / expected).sum().item()
            assert 140 < chi_square < 400, (shift, number)  # 255 degrees of freedom, deviation 23


def test_gumbel_has_mean_and_variance():
    keys = draw_keys(
        torch.arange(50), Purpose.TOKEN, torch.arange(50), torch.zeros(50, dtype=torch.int64)
    )
    noise = gumbel(keys, torch.arange(4000), torch.float64)
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.015)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.03)


@pytest.mark.parametrize("field", ["seed", "purpose", "position", "draw"])
def test_every_field_of_the_key_changes_the_stream(field):
    base = {"seed": 3, "purpose": Purpose.TOKEN, "position": 5, "draw": 0}
    other = base | {field: Purpose.ACCEPT if field == "purpose" else base[field] + 1}

    def stream(of):
        key = draw_keys(
            torch.tensor([of["seed"]]),
            of["purpose"],
            torch.tensor([of["position"]]),
            torch.tensor([of["draw"]]),
        )
        return uniform(key, torch.arange(5000), torch.float64)[0]

    first, second = stream(base), stream(other)
    correlation = torch.corrcoef(torch.stack((first, second)))[0, 1].item()
    assert abs(correlation) < 0.06
    assert torch.equal(stream(base), first)  # the control: nothing but the key matters


def test_neighbouring_indices_are_uncorrelated():
    key = draw_keys(*(torch.tensor([9]), Purpose.TOKEN, torch.tensor([4]), torch.tensor([0])))
    unit = uniform(key, torch.arange(20_000), torch.float64)[0]
    assert abs(torch.corrcoef(torch.stack((unit[1:], unit[:-1])))[0, 1].item()) < 0.03


def test_small_positions_draws_and_purposes_never_meet():
    positions, draws = torch.meshgrid(torch.arange(3000), torch.arange(40), indexing="ij")
    seeds = torch.full((positions.numel(),), request_seed(1, 0))
    keys = [draw_keys(seeds, purpose, positions.flatten(), draws.flatten()) for purpose in Purpose]
    assert len(torch.cat(keys).unique()) == 4 * positions.numel()

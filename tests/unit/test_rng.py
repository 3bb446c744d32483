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
    uniform,
)

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


def splitmix64(word: int) -> int:
    """The published function, next to its seed constant, on unbounded Python integers."""
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & MASK
    return word ^ (word >> 31)


def key_of(seed: int, purpose: int, position: int, draw: int) -> int:
    first, second = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
    return splitmix64((seed + position * GOLDEN + draw * first + (purpose + 1) * second) & MASK)


def unit_of(key: int, index: int) -> float:
    return ((splitmix64((key + (index + 1) * GOLDEN) & MASK) >> 12) + 0.5) * 2.0**-52


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


def test_extreme_words_stay_finite_in_float32():
    for word in (0, MASK):
        bits = torch.tensor([word >> 12])
        unit = bits.float().add_(0.5).mul_(2.0**-52).clamp_(max=1 - 2.0**-24)
        assert torch.isfinite(-(-(-unit).log1p()).log()).all()


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

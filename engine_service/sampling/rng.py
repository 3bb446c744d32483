"""Stateless random numbers: a function of (seed, choice, purpose, position, draw, index) alone.

It does not know batches, rows or strategies, so no draw can depend on them. The integers are
equal on every device; only the last bits of the logarithm may differ between devices.
"""

from __future__ import annotations

from enum import IntEnum

import torch

_WORD = (1 << 64) - 1


def _signed(word: int) -> int:
    """A 64-bit pattern as the int64 that torch stores it in."""
    return word - (1 << 64) if word >> 63 else word


# Constants of splitmix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators).
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_GOLDEN_I64, _FIRST_I64, _SECOND_I64 = _signed(_GOLDEN), _signed(_FIRST), _signed(_SECOND)
_MANTISSA_BITS = 52


class Purpose(IntEnum):
    """What a draw decides; draws of different purposes are independent."""

    TOKEN = 0
    REMASK = 1
    POSITION = 2
    ACCEPT = 3


def mix_word(word: int) -> int:
    """splitmix64's output function on an unsigned 64-bit Python integer."""
    word = (word ^ (word >> 30)) * _FIRST & _WORD
    word = (word ^ (word >> 27)) * _SECOND & _WORD
    return word ^ (word >> 31)


def request_seed(seed: int, choice: int) -> int:
    """The int64 that a row's table line holds: the request's seed mixed with its choice index."""
    return _signed(mix_word(mix_word(seed & _WORD) + (choice + 1) * _GOLDEN & _WORD))


def mix(words: torch.Tensor) -> torch.Tensor:
    """splitmix64's output function on int64 words, elementwise; overwrites and returns `words`.

    int64 multiplication wraps; a logical shift is an arithmetic one with the sign copies masked.
    One buffer takes every shift: at 150,000 ids per row, fresh memory costs more than arithmetic.
    """
    shifted = words >> 30
    words ^= shifted.bitwise_and_((1 << 34) - 1)
    words *= _FIRST_I64
    torch.bitwise_right_shift(words, 27, out=shifted)
    words ^= shifted.bitwise_and_((1 << 37) - 1)
    words *= _SECOND_I64
    torch.bitwise_right_shift(words, 31, out=shifted)
    words ^= shifted.bitwise_and_((1 << 33) - 1)
    return words


def draw_keys(
    seeds: torch.Tensor, purpose: Purpose, positions: torch.Tensor, draws: torch.Tensor
) -> torch.Tensor:
    """[N] int64 keys of N independent streams, from [N] int64 seeds, positions and draws.

    `seeds` are those of `request_seed`, already well mixed, so one more mix of a sum with three
    unrelated odd factors is enough: small positions, draws and purposes never meet in it.
    """
    words = positions * _GOLDEN_I64
    words += draws * _FIRST_I64
    words += seeds
    words += _signed((int(purpose) + 1) * _SECOND & _WORD)
    return mix(words)


def uniform(
    keys: torch.Tensor, indices: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """[N, K] numbers in the open interval (0, 1): stream keys[n] at index indices[n, k].

    `indices` is int64 [N, K] or [K]. 52 random bits are rounded to `dtype`, so small values keep
    their full resolution even in float32.
    """
    words = mix((indices + 1) * _GOLDEN_I64 + keys[:, None])
    words >>= 64 - _MANTISSA_BITS
    words &= (1 << _MANTISSA_BITS) - 1
    unit = words.to(dtype).add_(0.5).mul_(2.0**-_MANTISSA_BITS)
    return unit.clamp_(max=1 - torch.finfo(dtype).eps / 2)


def gumbel(
    keys: torch.Tensor, indices: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """[N, K] Gumbel(0, 1) noise; argmax(logits + noise) samples softmax(logits).

    The largest values decide the argmax, and they come from uniforms near 0, where floating
    point is finest; drawing them near 1 would cap them at 17 in float32 (arXiv 2409.02908).
    """
    return uniform(keys, indices, dtype).neg_().log1p_().neg_().log_().neg_()

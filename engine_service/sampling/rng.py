"""Stateless random numbers: a function of (seed, choice, purpose, position, draw, index) alone.

It does not know batches, rows or strategies, so no draw can depend on them. The integers are
equal on every device (kernels/vocab_tiles.py computes them there); only the last bits of the
logarithm may differ between devices.

A stream's key takes 64-bit arithmetic, its numbers 32-bit arithmetic: there is one key per token
and one number per token and id of the vocabulary, and a 64-bit product is four on a GPU.
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
# Constants of a 32-bit permutation with xor-shifts by 16, 15 and 15: the least biased one of this
# shape that the search of Wellons' hash-prospector has found (bias 0.108, lowbias32 has 0.174).
_FIRST_I32, _SECOND_I32 = 0x21F0AAAD, 0xD35A2D97 - (1 << 32)


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


def scramble(words: torch.Tensor) -> torch.Tensor:
    """A fixed permutation of int32 words in which every bit depends on every bit, elementwise;
    overwrites and returns `words`.

    One buffer takes every shift: at 150,000 ids per row, fresh memory costs more than arithmetic.
    """
    shifted = words >> 16
    words ^= shifted.bitwise_and_((1 << 16) - 1)
    words *= _FIRST_I32
    torch.bitwise_right_shift(words, 15, out=shifted)
    words ^= shifted.bitwise_and_((1 << 17) - 1)
    words *= _SECOND_I32
    torch.bitwise_right_shift(words, 15, out=shifted)
    words ^= shifted.bitwise_and_((1 << 17) - 1)
    return words


def uniform(
    keys: torch.Tensor, indices: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """[N, K] numbers in the open interval (0, 1): stream keys[n] at index indices[n, k].

    `indices` [N, K] or [K] are integers below 2^32. The two halves of the key enter one before each
    of two permutations (an Even-Mansour cipher of the index), so the words of one stream are all
    different. Streams whose keys share the upper half hold the same words in another order: keys
    must come from `draw_keys`. A number is (word + 1/2) / 2^32, rounded to `dtype`: small ones keep
    their full resolution even in float32. What 32 bits cut off is a probability of 2^-33 for each
    number, so less than 2^-15 for the 150,000 of a row; the largest Gumbel number is 22.9.
    """
    low, high = keys.to(torch.int32), (keys >> 32).to(torch.int32)
    words = scramble(indices.to(torch.int32) ^ low[:, None])
    words ^= high[:, None]
    unit = scramble(words).view(torch.uint32).to(dtype).add_(0.5).mul_(2.0**-32)
    return unit.clamp_(max=1 - torch.finfo(dtype).eps / 2)


def gumbel(
    keys: torch.Tensor, indices: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """[N, K] Gumbel(0, 1) noise; argmax(logits + noise) samples softmax(logits).

    The largest values decide the argmax, and they come from uniforms near 0, where floating
    point is finest; drawing them near 1 would cap them at 17 in float32 (arXiv 2409.02908).
    """
    return uniform(keys, indices, dtype).neg_().log1p_().neg_().log_().neg_()

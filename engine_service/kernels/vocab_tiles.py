"""Rows of logits in tiles, and Gumbel noise for them: device functions that several kernels share.

It launches nothing. Logits are float32, bfloat16 or float16; all arithmetic is float32. `draw_key`,
`unit_number` and `gumbel_noise` are the device halves of sampling/rng.py: the same integers, and
logarithms that differ in the last bits.
"""

from __future__ import annotations

from engine_service.kernels.jit import jit, tl

TILE = 4096
"""Logits per program: 32 a thread, four loads of 16 bytes in half formats. It is the same for any
number of rows, so a row's numbers do not depend on how many others share its step."""


@jit
def load_tile(
    line_ptr: tl.tensor,
    start: tl.tensor,
    vocab: tl.tensor,
    banned_ptr: tl.tensor,
    NUM_BANNED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Ids [start, start + BLOCK) of one row in float32; banned ids and ids behind V are -inf."""
    ids = start + tl.arange(0, BLOCK)
    x = tl.load(line_ptr + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
    for slot in tl.static_range(NUM_BANNED):
        banned = tl.load(banned_ptr + slot)
        # Most tiles hold no banned id; the branch saves them two instructions per logit.
        if (banned >= start) & (banned < start + BLOCK):
            x = tl.where(ids == banned, float("-inf"), x)
    return x


@jit
def exp_below(x: tl.tensor, top: tl.tensor) -> tl.tensor:
    """exp(x - top) for x <= top; as good as 0 where both are -inf, and where x is NaN."""
    # exp2 is one instruction; exp takes three more to keep numbers below 2^-126.
    return tl.exp2(distance_below(x, top) * 1.4426950408889634)


@jit
def distance_below(x: tl.tensor, top: tl.tensor) -> tl.tensor:
    """x - top for x <= top, cut off where exp of it does not count any more: always finite."""
    return tl.maximum(x - tl.maximum(top, -3.4e38), -80.0)


@jit
def lowest_best(score: tl.tensor, ids: tl.tensor, vocab: tl.tensor) -> tl.tensor:
    """(best score, lowest id that has it); NaN never wins, and the id is below V whatever comes."""
    best = tl.max(score, axis=0)
    found = tl.min(tl.where(score == best, ids, 2147483647), axis=0)
    return tl.where(best == best, best, float("-inf")), tl.minimum(found, vocab - 1)


@jit
def _mix(word: tl.tensor) -> tl.tensor:
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB
    return word ^ (word >> 31)


@jit
def draw_key(
    seed: tl.tensor, position: tl.tensor, draw: tl.tensor, PURPOSE: tl.constexpr
) -> tl.tensor:
    """uint64 key of one stream: rng.draw_keys on int64 scalars."""
    word = position.to(tl.uint64) * 0x9E3779B97F4A7C15 + draw.to(tl.uint64) * 0xBF58476D1CE4E5B9
    base: tl.constexpr = (PURPOSE + 1) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return _mix(word + seed.to(tl.uint64) + base)


@jit
def _scramble(word: tl.tensor) -> tl.tensor:
    word = (word ^ (word >> 16)) * 0x21F0AAAD
    word = (word ^ (word >> 15)) * 0xD35A2D97
    return word ^ (word >> 15)


@jit
def _ln(x: tl.tensor, HARDWARE_LOG: tl.constexpr) -> tl.tensor:
    if HARDWARE_LOG:
        log2 = tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
        return log2 * 0.6931471805599453
    return tl.log(x)


@jit
def unit_number(ids: tl.tensor, key: tl.tensor) -> tl.tensor:
    """rng.uniform at int32 ids of one stream, or of as many streams as there are ids."""
    low, high = key.to(tl.uint32), (key >> 32).to(tl.uint32)
    word = _scramble(_scramble(ids.to(tl.uint32) ^ low) ^ high)
    # (word + 0.5) / 2^32: scaling by a power of two rounds nothing, so one fused step is the same.
    u = tl.fma(word.to(tl.float32), 2.3283064365386963e-10, 1.1641532182693481e-10)
    return tl.minimum(u, 0.999999940395355)


@jit
def gumbel_noise(ids: tl.tensor, key: tl.tensor, HARDWARE_LOG: tl.constexpr) -> tl.tensor:
    """rng.gumbel at int32 ids of one stream: -ln(-ln(1 - u)).

    The inner logarithm needs its relative precision where u is small, for these win: there it is
    seven terms of its series; elsewhere and outside, the approximation of the hardware (absolute
    error 2^-22 near 1) moves a score by less than the rounding of a sum of 16.
    """
    u = unit_number(ids, key)
    series = tl.fma(u, 1 / 7, 1 / 6)
    series = tl.fma(u, series, 1 / 5)
    series = tl.fma(u, series, 1 / 4)
    series = tl.fma(u, series, 1 / 3)
    series = tl.fma(u, series, 1 / 2)
    series = tl.fma(u, series, 1.0) * u
    return -_ln(tl.where(u < 0.125, series, -_ln(1.0 - u, HARDWARE_LOG)), HARDWARE_LOG)

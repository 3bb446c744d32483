"""float32 numbers as integers of the same order, and the n-th largest of a line of them: what
kernels build choices of the best out of. It does not know what is chosen.
"""

from __future__ import annotations

from engine_service.kernels.jit import jit, tl


@jit
def ordered(x: tl.tensor) -> tl.tensor:
    """int64 keys, of 32 bits, in the order of float32 numbers. -0 comes before 0."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@jit
def number(key: tl.tensor) -> tl.tensor:
    """The float32 number of a key of `ordered`."""
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@jit
def count_from(
    key_ptr: tl.tensor, count: tl.tensor, least: tl.tensor, CHUNK: tl.constexpr
) -> tl.tensor:
    """int32: how many of `count` int32 keys are `least` or more."""
    found = tl.zeros([CHUNK], tl.int32)
    for start in range(0, count, CHUNK):
        place = start + tl.arange(0, CHUNK)
        key = tl.load(key_ptr + place, mask=place < count, other=0).to(tl.int64)
        found += ((key >= least) & (place < count)).to(tl.int32)
    return tl.sum(found, 0)


@jit
def nth_largest(
    key_ptr: tl.tensor, count: tl.tensor, n: tl.tensor, CHUNK: tl.constexpr
) -> tl.tensor:
    """int64: of `count` int32 keys the largest that n of them reach, found bit by bit; n is at
    least 1 and at most `count`."""
    least = tl.full([], -0x80000000, tl.int64)
    step = tl.full([], 0x80000000, tl.int64)
    for _ in range(32):
        found = count_from(key_ptr, count, least + step, CHUNK)
        least += tl.where(found >= n, step, 0)
        step = step >> 1
    return least

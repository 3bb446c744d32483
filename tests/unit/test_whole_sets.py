"""Time of a set by kernel: what overlaps counts once, what is idle is told."""

from __future__ import annotations

from benchmarks.whole_sets import Kernel, split_time

KERNELS = [
    Kernel(100, 50, "copy"),
    Kernel(140, 60, "FlashAttention"),  # 10 of it hidden behind the copy
    Kernel(150, 20, "norm"),  # all of it hidden
    Kernel(20_200, 100, "decode"),
    Kernel(20_310, 90, "decode"),
]


def test_times_by_kernel_add_up() -> None:
    prompts, rest = split_time(reversed(KERNELS), "flash")
    assert prompts.busy == {"copy": 50, "FlashAttention": 50, "norm": 0}
    assert (prompts.length, prompts.idle) == (100, 0)
    assert rest.busy == {"decode": 190}
    assert (rest.length, rest.idle) == (20_200, 20_010)
    assert rest.gaps == {("FlashAttention", "decode"): 20_000}, "short ones are not told"


def test_without_the_border_all_is_behind_it() -> None:
    prompts, rest = split_time(KERNELS, "no such kernel")
    assert (prompts.length, rest.length) == (0, 20_300)

"""Tokens that a caller fixes at places behind the prompt; what lies between them is generated.

It does not know strategies or tables: positions are absolute, and a pinned token is a final one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection
from itertools import pairwise, takewhile

from engine_service.core.checks import check_token_ids
from engine_service.core.step import EMPTY_CANVAS, Canvas, Update
from tidemill.runtime.errors import InvalidRequest

MAX_PINNED = 4096
"""Most pinned tokens of a request."""

Pinned = tuple[tuple[int, int], ...]
"""(position, token id), positions ascending."""


def read_pinned(
    given: Collection[tuple[int, int]], *, prompt_len: int, max_tokens: int, vocab_size: int
) -> Pinned:
    """`given` in order; raises InvalidRequest unless it is output, each position once, and not all
    of the output."""
    if not given:
        return ()
    if len(given) > MAX_PINNED:
        raise _wrong(f"pinned has {len(given)} entries; at most {MAX_PINNED} are allowed.")
    pinned = tuple(sorted(given))
    positions = [position for position, _ in pinned]
    twice = [a for a, b in pairwise(positions) if a == b]
    if twice:
        raise _wrong(f"pinned names position {twice[0]} more than once; name each position once.")
    first, last = positions[0], positions[-1]
    if first < prompt_len:
        raise _wrong(
            f"pinned holds position {first}, inside of the prompt of {prompt_len} tokens; pinned "
            f"tokens stand behind it, at {prompt_len} or later."
        )
    if last >= prompt_len + max_tokens:
        raise _wrong(
            f"pinned holds position {last}, but max_tokens is {max_tokens}: the output ends before "
            f"position {prompt_len + max_tokens}; raise max_tokens to at least "
            f"{last + 1 - prompt_len}, or pin nothing behind the output."
        )
    if len(pinned) == max_tokens:
        raise _wrong(
            f"pinned fills all {max_tokens} positions of the output and leaves nothing to "
            f"generate; raise max_tokens above {max_tokens}, or pin less."
        )
    check_token_ids("pinned", [token for _, token in pinned], vocab_size)
    return pinned


def output_through(pinned: Pinned, prompt_len: int) -> int:
    """Output tokens up to the last pinned one: with fewer the request is not complete."""
    return pinned[-1][0] + 1 - prompt_len if pinned else 0


def num_at_end(pinned: Pinned, stop: int) -> int:
    """How many stand side by side up to `stop`, where the output ends at the latest."""
    places = zip(reversed(pinned), range(stop - 1, -1, -1), strict=False)
    return sum(1 for _ in takewhile(lambda both: both[0][0] == both[1], places))


def pinned_from(pinned: Pinned, position: int) -> Pinned:
    """Those at `position` or behind it."""
    return pinned[bisect_left(pinned, (position,)) :]


def num_pinned_before(pinned: Pinned, position: int) -> int:
    """How many stand before `position`."""
    return bisect_left(pinned, (position,))


def pin(canvas: Canvas, start: int, pinned: Pinned) -> Canvas:
    """The canvas that begins at position `start`, with the pinned tokens in it final."""
    stop = start + len(canvas.token_ids)
    inside = pinned[bisect_left(pinned, (start,)) : bisect_left(pinned, (stop,))]
    if not inside:
        return canvas
    token_ids, fixed = list(canvas.token_ids), list(canvas.fixed)
    for position, token in inside:
        token_ids[position - start] = token
        fixed[position - start] = True
    return canvas._replace(token_ids=tuple(token_ids), fixed=tuple(fixed))


def keep_pinned(update: Update, committed_len: int, pinned: Pinned, max_len: int) -> Update:
    """What a step did to a request with pinned tokens, which had `committed_len` tokens before.

    A tail that the strategy opened gets its pinned tokens. Where nothing but pinned tokens is left
    of the `max_len` tokens, they are committed at once: there is nothing to compute.
    """
    stop = committed_len + len(update.commit)
    rest = pinned_from(pinned, stop)
    if len(rest) != max_len - stop:
        return update._replace(canvas=pin(update.canvas, stop, pinned))
    commit = [*update.commit, *(token for _, token in rest)]
    logprobs = update.logprobs
    if logprobs is not None:
        logprobs = [*logprobs, *[None] * len(rest)]
    return Update(commit, logprobs, update.num_cached, EMPTY_CANVAS)


def _wrong(message: str) -> InvalidRequest:
    return InvalidRequest(message, param="pinned")

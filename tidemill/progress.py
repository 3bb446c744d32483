"""The progress bar of an offline call. It does not know what is computed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress(num_requests: int, *, is_shown: bool) -> Iterator[Callable[[int], None]]:
    """Requests out of so many, on stderr. What it gives is called with the output tokens of each
    that has ended, and shows their rate."""
    from tqdm import tqdm

    num_tokens = 0
    with tqdm(
        total=num_requests, desc="Generating", unit="req", disable=not is_shown,
        file=sys.stderr, dynamic_ncols=True,
    ) as bar:  # fmt: skip

        def ended(tokens: int) -> None:
            nonlocal num_tokens
            num_tokens += tokens
            rate = num_tokens / max(bar.format_dict["elapsed"], 1e-9)
            bar.set_postfix_str(f"{rate:,.0f} tok/s", refresh=False)
            bar.update()

        yield ended

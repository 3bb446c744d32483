"""Ends that an API has no word for. It does not know the APIs."""

from __future__ import annotations

from tidemill.runtime.errors import Unavailable


def check_finished(finish_reason: str) -> None:
    """Raises the error that an end other than `stop` and `length` is to such a client."""
    if finish_reason == "abort":
        raise Unavailable(
            "the engine ended this request before it was finished; send it again",
            reason="ABORTED",
            retry_after_ms=1000,
        )

"""How a process ended, in words. It knows no processes."""

import signal


def ending(code: int) -> str:
    """Of a return code: an exit status, or a signal's number, negative."""
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with status {code}"

"""`tidemill frontend`: the frontend in this process."""

from collections.abc import Sequence

from frontend.__main__ import main
from tidemill.commands.spellings import ours


def run(argv: Sequence[str]) -> int:
    """Serves until SIGTERM; returns the exit status."""
    return main(ours(argv))

"""`tidemill engine [MODEL]`: the engine service in this process."""

from collections.abc import Sequence

from engine_service.__main__ import main
from tidemill.commands.spellings import ours


def run(argv: Sequence[str]) -> int:
    """Serves until SIGTERM; returns the exit status."""
    return main(ours(argv))

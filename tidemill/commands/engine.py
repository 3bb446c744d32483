"""`tidemill engine`: the engine in this process."""

from collections.abc import Sequence

from engine_service.config import EngineConfig
from tidemill.commands.spellings import ours
from tidemill.runtime import options


def run(argv: Sequence[str]) -> int:
    """Serves until SIGTERM; returns the exit status."""
    given = ours(argv)
    options.parse(
        [EngineConfig], given, prog="tidemill engine", positional="model"
    )  # --help before slow imports
    from engine_service.__main__ import main

    return main(given)

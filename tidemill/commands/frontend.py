"""`tidemill frontend`: the frontend in this process."""

from collections.abc import Sequence

from frontend import limits
from frontend.config import FrontendConfig
from tidemill.commands.foreign_flags import ADVICE
from tidemill.commands.spellings import ours
from tidemill.runtime import options


def run(argv: Sequence[str]) -> int:
    """Serves until SIGTERM; returns the exit status. Raises what `limits.check` does."""
    given = ours(argv)
    options.parse(
        [FrontendConfig], given, prog="tidemill frontend", advice=ADVICE, check=limits.check
    )  # --help before slow imports
    from frontend.__main__ import main

    return main(given)

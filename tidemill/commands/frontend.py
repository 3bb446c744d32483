"""`tidemill frontend`: the frontend in this process."""

from collections.abc import Sequence

from frontend import limits
from frontend.config import FrontendConfig
from tidemill.commands.foreign_flags import ADVICE
from tidemill.commands.spellings import SPELLINGS
from tidemill.runtime import options


def run(argv: Sequence[str]) -> int:
    """Serves until SIGTERM; returns the exit status. Raises what `limits.check` does."""
    (config,) = options.parse(
        [FrontendConfig],
        argv,
        prog="tidemill frontend",
        advice=ADVICE,
        spellings=SPELLINGS,
        check=limits.check,
    )  # --help before slow imports
    from frontend.__main__ import serve

    return serve(config)

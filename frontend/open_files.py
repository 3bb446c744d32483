"""How many sockets and files this process may hold."""

from __future__ import annotations

import contextlib
import resource

_MOST = 65_536


def allow_many() -> None:
    """Raises the soft limit as far as the hard one allows, at most to 65,536.

    Shells start programs with 1,024, which end at the thousandth connection.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    wanted = _MOST if hard == unlimited else min(_MOST, hard)
    if soft != unlimited and soft < wanted:
        with contextlib.suppress(ValueError, OSError):  # some systems allow less than they say
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))

"""`mixed_requests` with a follower that hears of no new pages from some step on."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import Any

from engine_service import follower
from engine_service.core.step import StepPlan
from engine_service.rank_worker import open_worker
from engine_service.ranks import group
from tests.equivalence import mixed_requests


def open_forgetful(*args: Any, **options: Any) -> Any:
    """A worker that does not hear of pages from step 30 on."""
    worker = open_worker(*args, **options)
    real = worker.launch

    def launch(plan: StepPlan) -> Any:
        return real(replace(plan, page_appends=()) if plan.seq >= 30 else plan)

    worker.launch = launch  # type: ignore[method-assign]
    return worker


def main(argv: list[str]) -> int:
    if not argv[0].startswith("demo"):
        return follower.main(argv, open_forgetful)
    defaults = group.open_group.__kwdefaults__
    defaults["module"] = "tests.equivalence.missed_plan"
    mixed_requests.main(argv[0], *map(int, argv[1:]))
    return 0


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(status)

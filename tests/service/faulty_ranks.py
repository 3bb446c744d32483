"""The rank process with followers that fail as TIDEMILL_TEST_FAULT says.

refuse: rank 1 cannot load. bug: rank 1 has a bug while it loads. step: rank 1 fails in step 20.
meet, group: rank 1 is killed where the ranks meet, before or behind its first word. patience: it
waits 8 s there.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import torch

from engine_service import distributed, follower, rank
from engine_service.rank_worker import open_worker
from engine_service.ranks import group
from tidemill.runtime.errors import NotFound


def die(*_: object, **__: object) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def open_faulty(*args: Any, **options: Any) -> Any:
    fault = os.environ["TIDEMILL_TEST_FAULT"]
    if options["place"].rank != 1:
        return open_worker(*args, **options)
    if fault == "refuse":
        raise NotFound("model-00002-of-00002.safetensors is missing", param="model")
    if fault == "bug":
        raise KeyError("lm_head")
    if fault == "patience":
        distributed._MEET_S = 8.0
    if fault == "meet":
        distributed.kind_of = die  # type: ignore[assignment]
    if fault == "group":
        torch.distributed.init_process_group = die
    worker = open_worker(*args, **options)
    real = worker.launch

    def launch(plan: Any) -> Any:
        if plan.seq == 20 and fault == "step":
            raise RuntimeError("device-side assert")
        return real(plan)

    worker.launch = launch  # type: ignore[method-assign]
    return worker


def main(argv: list[str]) -> int:
    if len(argv) > 2:
        return follower.main(argv, open_faulty)
    defaults = group.open_group.__kwdefaults__
    defaults["module"] = "tests.service.faulty_ranks"
    return rank.main(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

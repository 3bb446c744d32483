"""Main of the rank process.

`python -m engine_service.rank FD PARENT_PID`: FD is our end of the pipe, the first message on it
is the EngineConfig. It does not know gRPC, nor what an engine consists of.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import signal
import socket
import sys

from engine_service.composition import compose
from engine_service.core.loop import CoreLoop
from engine_service.core.messages import Fatal, Progress, Ready
from engine_service.core.warm_up import warm_up
from engine_service.core.watch import Watch
from engine_service.pipe import BlockingPipe, PeerGone
from tidemill.runtime import log
from tidemill.runtime.errors import ServiceError

_PR_SET_PDEATHSIG = 1
_LOG = logging.getLogger("tidemill.rank")


def _die_with(parent_pid: int) -> None:
    """The kernel kills this process when its parent dies, also while it loads."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        sys.exit("the engine server is gone already")


def _calm_the_collector() -> None:
    """Keeps Python's cycle collector out of the step.

    With the default thresholds it ran several times a step over everything that loading had made:
    0.4 ms of 2.3 ms host time at 256 rows (measured with torch imported).
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def main(argv: list[str]) -> int:
    """Serves one pipe until its other end closes; returns the exit status."""
    _die_with(int(argv[1]))
    for number in (signal.SIGINT, signal.SIGTERM):  # the server decides when this process ends
        signal.signal(number, signal.SIG_IGN)
    pipe = BlockingPipe(socket.socket(fileno=int(argv[0])))
    try:
        return _serve(pipe)
    except PeerGone:
        return 1


def _serve(pipe: BlockingPipe) -> int:
    config = pipe.receive(None)[0]
    log.configure(config.log_level, service="rank0")
    try:
        engine = compose(config, lambda *progress: pipe.send([Progress(*progress)]))
        pipe.send([Progress("warm-up", 0, 0)])
        warm_up(engine.scheduler, engine.executor, engine.facts)
    except ServiceError as error:
        pipe.send([Fatal(error.message)])
        return 1
    except ModuleNotFoundError as missing:
        _LOG.error("start-up needs %s", missing.name)
        pipe.send([Fatal(f"{missing.name} is not installed: pip install 'tidemill[engine]'")])
        return 1
    except Exception as bug:
        _LOG.exception("start-up failed")
        pipe.send([Fatal(f"start-up failed: {type(bug).__name__}: {bug}")])
        return 1
    _calm_the_collector()
    pipe.send([Ready(engine.facts)])
    CoreLoop(
        inbox=pipe,
        outbox=pipe,
        scheduler=engine.scheduler,
        executor=engine.executor,
        watch=Watch(engine.scheduler.planner, engine.memory),
        profiler=engine.profiler,
    ).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

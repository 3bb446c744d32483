"""Main of the rank process.

`python -m engine_service.rank FD PARENT_PID`: FD is our end of the pipe, the first message on it
is the EngineConfig. It does not know gRPC, nor what an engine consists of.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading

from engine_service.child import calm_the_collector, die_with, ignore_stop_signals, load_calmly
from engine_service.composition import compose
from engine_service.core.loop import CoreLoop
from engine_service.core.messages import Fatal, Progress, Ready
from engine_service.core.warm_up import warm_up
from engine_service.core.watch import Watch
from engine_service.pipe import BlockingPipe, PeerGone
from tidemill.runtime import log
from tidemill.runtime.errors import ServiceError

_HEARD_S = 0.5
_ENDED_S = 1.0
_LOG = logging.getLogger("tidemill.rank")


def main(argv: list[str]) -> int:
    """Serves one pipe until its other end closes; returns the exit status."""
    die_with(int(argv[1]))
    ignore_stop_signals()
    load_calmly()
    pipe = BlockingPipe(socket.socket(fileno=int(argv[0])))
    try:
        return _serve(pipe)
    except PeerGone:
        return 1


def _serve(pipe: BlockingPipe) -> int:
    config = pipe.receive(None)[0]
    log.configure(config.log_level, service="rank0")
    try:
        engine = compose(
            config,
            lambda *progress: pipe.send([Progress(*progress)]),
            on_lost=lambda error: _end(pipe, error),
        )
        pipe.send([Progress("warm-up", 0, 0)])
        warm_up(engine.scheduler, engine.executor, engine.facts)
    except ServiceError as error:
        pipe.send([Fatal(error.message, is_refusal=error.http_status < 500)])
        return 1
    except ModuleNotFoundError as missing:
        _LOG.error("start-up needs %s", missing.name)
        advice = f"{missing.name} is not installed: pip install 'tidemill[engine]'"
        pipe.send([Fatal(advice, is_refusal=True)])
        return 1
    except Exception as bug:
        _LOG.exception("start-up failed")
        pipe.send([Fatal(f"start-up failed: {type(bug).__name__}: {bug}")])
        return 1
    calm_the_collector()
    pipe.send([Ready(engine.facts)])
    loop = CoreLoop(
        inbox=pipe,
        outbox=pipe,
        scheduler=engine.scheduler,
        executor=engine.executor,
        watch=Watch(engine.scheduler.planner, engine.memory, engine.others),
        profiler=engine.profiler,
        transfers=engine.transfers,
    )
    try:
        loop.run()
    finally:
        engine.close()
    return 0


def _end(pipe: BlockingPipe, error: ServiceError) -> None:
    """A rank is lost: tells the server and ends this process from a thread beside the main one,
    which may wait for that rank for ever, or hold what logging needs."""
    late = threading.Timer(_HEARD_S + _ENDED_S, os._exit, [1])
    late.daemon = True
    late.start()
    pipe.last_words([Fatal(error.message)], _HEARD_S)
    _LOG.critical("%s", error)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Main of the processes of all ranks but the first.

`python -m engine_service.follower PIPE MEMORY NEWS ROOM PARENT_PID`: descriptors of the pipe to
rank 0 and of the shared memory with its plans; the first message on the pipe says what to load. It
does not know what comes out of the steps.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, NamedTuple

from engine_service.child import die_with, ignore_stop_signals, load_calmly
from engine_service.pipe import BlockingPipe, PeerGone
from engine_service.ranks.broadcast import Reader, Wires
from engine_service.ranks.guard import Guard
from engine_service.ranks.messages import Start
from tidemill.runtime import log

if TYPE_CHECKING:
    from engine_service.ranks.group import OpenWorker


def main(argv: list[str], make: OpenWorker | None = None) -> int:
    """Follows rank 0 until it ends; returns the exit status.

    Imports torch, which takes seconds, or minutes from a network's storage: when it dies with rank
    0 already, calmly, and shows signs of life meanwhile as soon as it has been told what to load.
    """
    fd, memory, news, room, leader_pid = map(int, argv)
    die_with(leader_pid)
    ignore_stop_signals()
    pipe = BlockingPipe(socket.socket(fileno=fd))
    wires, begun = Wires(memory, news, room), Future[_Begun]()

    def begin() -> None:
        try:
            begun.set_result(_begin(pipe, wires, leader_pid))
        except BaseException as error:
            begun.set_exception(error)

    threading.Thread(target=begin, name="start", daemon=True).start()
    load_calmly()
    from engine_service.rank_worker import open_worker
    from engine_service.ranks.following import follow

    try:
        start, plans = begun.result()
    except PeerGone:
        return 1
    return follow(pipe, start, plans, make or open_worker)


class _Begun(NamedTuple):
    start: Start
    plans: Reader


def _begin(pipe: BlockingPipe, wires: Wires, leader_pid: int) -> _Begun:
    """Waits for what rank 0 says first, and shows signs of life from then on. Raises PeerGone."""
    start: Start = pipe.receive(None)[0]
    rank, size = start.place.rank, start.place.size
    log.configure(start.config.log_level, service=f"rank{rank}")
    plans = Reader(wires, reader=rank - 1, num_readers=size - 1)
    Guard(plans, leader_pid, ends_silent_leader=start.ends_silent_leader)
    return _Begun(start, plans)


if __name__ == "__main__":
    status = main(sys.argv[1:])
    logging.shutdown()
    # Nothing here outlives the process, and taking down what the ranks share would wait for them.
    os._exit(status)

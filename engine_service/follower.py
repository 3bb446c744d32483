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

from engine_service.child import die_with, ignore_stop_signals
from engine_service.pipe import BlockingPipe, PeerGone
from engine_service.rank_worker import open_worker
from engine_service.ranks.broadcast import Reader, Wires
from engine_service.ranks.following import follow
from engine_service.ranks.group import OpenWorker
from engine_service.ranks.guard import Guard
from engine_service.ranks.messages import Start
from tidemill.runtime import log


def main(argv: list[str], make: OpenWorker = open_worker) -> int:
    """Follows rank 0 until it ends; returns the exit status."""
    fd, memory, news, room, leader_pid = map(int, argv)
    die_with(leader_pid)
    ignore_stop_signals()
    pipe = BlockingPipe(socket.socket(fileno=fd))
    try:
        start: Start = pipe.receive(None)[0]
    except PeerGone:
        return 1
    rank, size = start.place.rank, start.place.size
    log.configure(start.config.log_level, service=f"rank{rank}")
    plans = Reader(Wires(memory, news, room), reader=rank - 1, num_readers=size - 1)
    Guard(plans, leader_pid, ends_silent_leader=start.ends_silent_leader)
    return follow(pipe, start, plans, make)


if __name__ == "__main__":
    status = main(sys.argv[1:])
    logging.shutdown()
    # Nothing here outlives the process, and taking down what the ranks share would wait for them.
    os._exit(status)

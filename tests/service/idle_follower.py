"""A follower without a model or torch, which starts in a moment: it reads plans and does as told.

Its first message is (rank, number of followers, whether it ends a silent rank 0, how it behaves).
"""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import sys
import time

from engine_service.child import die_with, ignore_stop_signals
from engine_service.pipe import BlockingPipe, unpack
from engine_service.ranks.broadcast import Ended, Reader, Wires
from engine_service.ranks.guard import Guard
from engine_service.ranks.messages import (
    Failed,
    Here,
    Loaded,
    PagesAwaited,
    PagesRead,
    PagesTaken,
    Ran,
    Stage,
    WritePages,
)
from tidemill.runtime.errors import InternalError, InvalidRequest


def main(argv: list[str]) -> int:
    fd, memory, news, room, leader_pid = map(int, argv)
    die_with(leader_pid)
    ignore_stop_signals()
    pipe = BlockingPipe(socket.socket(fileno=fd))
    rank, count, ends_silent_leader, behaviour = pipe.receive(None)[0]
    plans = Reader(Wires(memory, news, room), reader=rank - 1, num_readers=count)
    Guard(plans, leader_pid, ends_silent_leader=ends_silent_leader)
    pipe.send([Here(), Stage("weights")])
    match behaviour:
        case "refuses":
            wrong = InvalidRequest("page_size 7 does not go", param="page_size")
            pipe.send([Failed(wrong, is_verdict=True)])
            return 1
        case "exits while it loads":
            return 7
        case "loads":
            for done in range(1, 5):
                pipe.send([Stage("weights", done, 4)])
                plans.receive()
            pipe.send([Stage("profile")])
    pipe.send([Loaded({"num_pages": 10})])
    seen = hashlib.sha256()
    try:
        while True:
            plan = plans.receive()
            if behaviour.startswith("tells pages"):
                pipe.send([PagesRead(bytearray(int(behaviour.split()[-1])))])
            if behaviour in ("mirrors pages", "keeps pages"):
                if isinstance(unpack(plan), WritePages):
                    pipe.send([PagesAwaited()])
                    (given,) = pipe.receive(None)
                    pipe.send([Stage("keeps"), *[PagesTaken()] * (behaviour == "mirrors pages")])
                else:
                    pipe.send([PagesRead(given.content)])
            if behaviour.startswith("is timed"):
                now = time.monotonic_ns() - int(behaviour.split()[-1])
                pipe.send([Ran(int(plan), now - 1000, now)])
            if (
                behaviour == "mourns" and plan == b"crash"
            ):  # what a collective says when a peer dies
                lost = InternalError("RuntimeError: connection closed by peer")
                pipe.send([Failed(lost, is_verdict=False)])
                return 1
            if behaviour == "counts":  # what has come, to compare it with what was sent
                seen.update(len(plan).to_bytes(8, "little") + plan)
                if plan == b"tell":
                    pipe.send([Stage(seen.hexdigest())])
            if plan.startswith(b"sleep "):  # a step that takes so long
                time.sleep(float(plan[6:]))
            if behaviour == "crashes" and plan == b"crash":
                os.kill(os.getpid(), signal.SIGSEGV)
    except Ended:
        return 0


if __name__ == "__main__":
    os._exit(main(sys.argv[1:]))

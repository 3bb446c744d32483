"""Main of the process that stands for a rank of another host beside rank 0.

`python -m engine_service.ranks.near PIPE MEMORY NEWS ROOM SOCKET STATE PARENT_PID`: what a follower
gets, and the link to the rank's host; STATE is a pipe with what else there is to know. Rank 0 sees
a follower: it reads plans, shows signs of life as long as the rank does, and says what the rank
says. It does not know what plans and messages are.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from typing import NamedTuple, NoReturn

from engine_service.child import die_with, ignore_stop_signals
from engine_service.pipe import FramePipe, PeerGone, pack
from engine_service.ranks.broadcast import Ended, Reader, Wires
from engine_service.ranks.frames import CODE, COUNT, WINDOW, Frame
from engine_service.ranks.guard import Guard
from engine_service.ranks.link import Link, LinkLost
from engine_service.ranks.messages import Failed
from engine_service.ranks.silence import CUT_S, TICK_S, Silence
from tidemill.runtime.errors import EngineDead

_LEFT_S = 4.0
_UNREAD_S = 0.5


class Told(NamedTuple):
    """What STATE says."""

    link: str
    rank: int
    num_ranks: int
    ends_silent_leader: bool


class Near:
    """Four threads: plans out, messages out, everything in, and the guard."""

    def __init__(self, pipe: FramePipe, plans: Reader, link: Link) -> None:
        self._pipe, self._plans, self._link = pipe, plans, link
        self._acked = 0
        self._changed = threading.Condition()
        self._silence, self._looked = Silence(), time.monotonic()
        self._is_ending = False
        self._ending = threading.Lock()
        self._listener = threading.Thread(target=self._listen, daemon=True)

    def run(self) -> NoReturn:
        """Ends this process."""
        self._listener.start()
        threading.Thread(target=self._pass_messages, daemon=True).start()
        sent = 0
        try:
            while True:
                plan = self._plans.receive()
                with self._changed:
                    while sent - self._acked >= WINDOW:
                        self._changed.wait()
                self._link.send(Frame.PLAN, plan)
                sent += 1
        except Ended as last:
            self._leave(str(last))
        except LinkLost as failure:
            self._lose(str(failure))

    def beat(self) -> None:
        """By the guard: rank 0's signs of life go on; the rank's are shown when they come. Whoever
        has a loss to tell, it is not the guard, which has rank 0 to look after."""
        if self._ending.locked():
            return
        now = time.monotonic()
        serves = self._plans.num_received > 0
        self._silence.look(self._link.num_received, now - self._looked, serves=serves)
        self._looked = now
        why = ""
        if self._silence.seconds > CUT_S:
            why = f"nothing has come from there for {self._silence.seconds:.1f} s"
        try:
            self._link.offer(Frame.BEAT, COUNT.pack(self._plans.writer_beat()))
        except LinkLost as failure:
            why = str(failure)
        if why:
            threading.Thread(target=self._lose, args=(why,), daemon=True).start()

    def _pass_messages(self) -> None:
        try:
            for body in self._pipe.frames():
                self._link.send(Frame.PIPE, body)
        except LinkLost as failure:
            self._lose(str(failure))

    def _listen(self) -> None:
        alive = 0
        try:
            while True:
                kind, payload = self._link.receive()
                match kind:
                    case Frame.PIPE:
                        self._pipe.send(payload)
                    case Frame.BEAT:
                        if (count := COUNT.unpack(payload)[0]) != alive:
                            alive = count
                            self._plans.beat()
                    case Frame.ACK:
                        with self._changed:
                            self._acked = COUNT.unpack(payload)[0]
                            self._changed.notify()
                    case Frame.GONE:
                        self._bury(CODE.unpack_from(payload)[0], payload[CODE.size :].decode())
                    case _:
                        raise LinkLost(f"a frame of kind {kind}")
        except PeerGone:
            os._exit(1)
        except LinkLost as failure:
            self._lose(str(failure))

    def _leave(self, reason: str) -> NoReturn:
        """Rank 0 is through: so is the rank, and then this process."""
        self._is_ending = True
        try:
            self._link.send(Frame.END, reason.encode())
        except LinkLost:
            os._exit(1)
        time.sleep(_LEFT_S)
        os._exit(0)

    def _bury(self, code: int, words: str) -> NoReturn:
        """The follower has ended. If it could say why, it has."""
        if code < 0:
            self._say(words)
        os._exit(max(code, 0) or int(code < 0))

    def _lose(self, why: str) -> NoReturn:
        if self._is_ending:
            os._exit(0)
        if self._listener.is_alive() and threading.current_thread() is not self._listener:
            self._listener.join(_UNREAD_S)  # how the rank has ended may still lie unread
        self._say(
            f"the connection to its host broke ({why}): its processes there have ended, or the "
            "network is cut"
        )
        seen = self._plans.writer_beat()
        while self._plans.writer_beat() == seen:  # a stopped rank 0 has nobody else to end it
            time.sleep(TICK_S)
        os._exit(1)

    def _say(self, words: str) -> None:
        """The first word counts; who else has one waits for the end of the process."""
        self._ending.acquire()
        try:
            self._pipe.send(pack([Failed(EngineDead(words), is_verdict=True)]))
        except PeerGone:
            return  # nobody listens


def main(argv: list[str]) -> NoReturn:
    """Until rank 0 or the rank ends."""
    fd, memory, news, room, sock, state, leader_pid = map(int, argv)
    die_with(leader_pid)
    ignore_stop_signals()
    with os.fdopen(state, "rb") as told_by:
        told = Told(**json.loads(told_by.read()))
    num_readers = told.num_ranks - 1
    plans = Reader(Wires(memory, news, room), reader=told.rank - 1, num_readers=num_readers)
    link = Link.take_over(sock, told.link.encode())
    near = Near(FramePipe(socket.socket(fileno=fd)), plans, link)
    Guard(plans, leader_pid, ends_silent_leader=told.ends_silent_leader, beat=near.beat)
    near.run()


if __name__ == "__main__":
    main(sys.argv[1:])

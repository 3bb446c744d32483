"""What stands for rank 0 beside a rank of another host: it starts the follower, and passes on.

`python -m engine_service.ranks.far STATE PARENT_PID`: STATE is a pipe that says where rank 0 is and
who this is. The follower sees rank 0: plans in shared memory, a pipe, signs of life. It does not
know what plans and messages are.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, NamedTuple

from engine_service.child import die_with, ignore_stop_signals, start_child
from engine_service.pipe import FramePipe, PeerGone, pair
from engine_service.ranks.broadcast import Writer
from engine_service.ranks.frames import ACK_EVERY, CODE, COUNT, Frame
from engine_service.ranks.likeness import difference
from engine_service.ranks.link import Link, LinkLost, NotOneOfUs, knock
from engine_service.ranks.processes import FOLLOWER_MODULE
from engine_service.ranks.silence import CUT_S, SERVING_S, TICK_S, Silence
from tidemill.runtime import log
from tidemill.runtime.endings import ending
from tidemill.runtime.errors import (
    FailedPrecondition,
    ServiceError,
    Unauthenticated,
    Unavailable,
)

LEAVING_S = 3.0
_AGAIN_S = 0.5
_KNOCKING_S = 5.0
_SAY_EVERY_S = 30.0
_KILLED_S = 5.0
_LOG = logging.getLogger("tidemill.rank")


class Post(NamedTuple):
    """Where rank 0 waits, and who comes. `secret` in hex; `likeness` of this host."""

    leader: tuple[str, int]
    secret: str
    rank: int
    local_rank: int
    local_size: int
    likeness: dict[str, Any]
    patience_s: float
    log_level: str = "info"
    module: str = FOLLOWER_MODULE


class _FollowerEnded(Exception):
    """It makes no more room."""


class Far:
    """Four threads: everything in, plans on, messages out, and the watch.

    Plans have their own: while the follower is behind and the ring full, rank 0's signs of life, or
    its loss, still come in. What waits is a WINDOW at most.
    """

    def __init__(self, link: Link, rank: int, num_ranks: int, module: str) -> None:
        """Call it in the thread that lives as long as the follower should."""
        self._link = link
        self._plans = Writer(num_ranks - 1, check=self._check, only=rank - 1)
        self._reader = rank - 1
        ours, theirs = pair()
        with theirs:
            wires = self._plans.wires(self._reader)
            self._process = start_child(module, fds=[theirs.fileno(), *wires])
        self._pidfd = os.pidfd_open(self._process.pid)
        self._pipe = FramePipe(ours)
        self._num_plans = 0
        self._arrived: SimpleQueue[bytes | None] = SimpleQueue()
        self._listens = False
        self._plan = threading.Thread(target=self._pass_plans, daemon=True)
        self._messages = threading.Thread(target=self._pass_messages, daemon=True)
        self._watch = threading.Thread(target=self._keep_watch, daemon=True)

    def run(self) -> int:
        """Until rank 0 or the follower ends; then nothing is left of it. The exit status."""
        for thread in (self._plan, self._messages, self._watch):
            thread.start()
        try:
            return self._listen()
        except LinkLost as failure:
            _LOG.error("rank 0's host is lost: %s", failure)
        except PeerGone:
            self._watch.join()  # it has told by then
        finally:
            self._close()
        return 1

    def _listen(self) -> int:
        alive = 0
        while True:
            self._listens = True
            kind, payload = self._link.receive()
            self._listens = False
            match kind:
                case Frame.PIPE:
                    self._pipe.send(payload)
                case Frame.PLAN:
                    self._arrived.put(payload)
                case Frame.BEAT:
                    if (count := COUNT.unpack(payload)[0]) != alive:
                        alive = count
                        self._plans.beat()
                case Frame.END:
                    return self._leave(payload.decode())
                case _:
                    raise LinkLost(f"a frame of kind {kind}")

    def _leave(self, reason: str) -> int:
        deadline = time.monotonic() + LEAVING_S
        self._arrived.put(None)
        self._plan.join(LEAVING_S)
        self._plans.end(reason)
        ended = select.poll()
        ended.register(self._pidfd, select.POLLIN)
        ended.poll(max(0.0, deadline - time.monotonic()) * 1e3)
        return 0

    def _close(self) -> None:
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_KILLED_S)
        self._link.shut()
        self._arrived.put(None)
        for thread in (self._plan, self._messages, self._watch):
            thread.join(_KILLED_S)
        for one in (self._link, self._pipe, self._plans):
            one.close()
        os.close(self._pidfd)

    def _check(self) -> None:
        """While there is no room for a plan."""
        if self._process.poll() is not None:
            raise _FollowerEnded

    def _pass_plans(self) -> None:
        try:
            while (plan := self._arrived.get()) is not None:
                self._plans.send(plan)
                self._num_plans += 1
                if self._num_plans % ACK_EVERY == 0:
                    self._link.send(Frame.ACK, COUNT.pack(self._num_plans))
        except _FollowerEnded:
            return  # the watch has seen it, and tells
        except Exception as failure:  # rank 0 hears of it, and not of a follower that has no plans
            if not isinstance(failure, LinkLost):
                _LOG.exception("plans do not go on")
            self._link.shut()

    def _pass_messages(self) -> None:
        try:
            for body in self._pipe.frames():
                self._link.send(Frame.PIPE, body)
        except LinkLost:
            self._link.shut()  # who listens hears of it too

    def _keep_watch(self) -> None:
        ended = select.poll()
        ended.register(self._pidfd, select.POLLIN)
        silence, looked = Silence(), time.monotonic()
        try:
            while not ended.poll(TICK_S * 1e3):
                now = time.monotonic()
                serves = self._num_plans > 0
                if not self._listens:  # the follower takes what it is told, which may be much
                    silence = Silence()
                silence.look(self._link.num_received, now - looked, serves=serves)
                looked = now
                if silence.seconds > (SERVING_S if serves else CUT_S):
                    _LOG.error("nothing has come from rank 0's host for %.1f s", silence.seconds)
                    self._link.shut()
                    return
                self._link.offer(Frame.BEAT, COUNT.pack(self._plans.reader_beat(self._reader)))
            self._messages.join()  # what it has said comes before how it ended
            code = self._process.wait()
            words = f"its process (pid {self._process.pid}) {ending(code)}"
            self._link.send(Frame.GONE, CODE.pack(code) + words.encode())
        except LinkLost:
            _LOG.debug("rank 0's host is gone")
        self._link.shut()


def join(post: Post) -> tuple[Link, int]:
    """Goes to rank 0 and waits to be welcome; returns the link and the number of ranks. Raises
    Unauthenticated, FailedPrecondition with what is not alike, or Unavailable."""
    link = _reach(post)
    facts = {
        "rank": post.rank,
        "local_rank": post.local_rank,
        "local_size": post.local_size,
        "host": socket.gethostname(),
        "likeness": post.likeness,
    }
    try:
        link.send(Frame.FACTS, json.dumps(facts).encode())
        kind, payload = link.receive()
    except LinkLost as failure:
        raise Unavailable(f"rank 0 at {_name(post)} has ended: {failure}") from failure
    if kind == Frame.REFUSED:
        raise FailedPrecondition(payload.decode(), reason="RANKS_DIFFER")
    told = json.loads(payload)
    wrong = difference(told["likeness"], post.likeness, f"on rank {post.rank}")
    if wrong is not None:
        raise FailedPrecondition(wrong, reason="RANKS_DIFFER")
    return link, told["num_ranks"]


def _reach(post: Post) -> Link:
    secret, name = bytes.fromhex(post.secret), _name(post)
    began = said = time.monotonic()
    while True:
        sock = None
        try:
            sock = socket.create_connection(post.leader, _KNOCKING_S)
            return knock(sock, secret)
        except NotOneOfUs as failure:
            _drop(sock)
            raise Unauthenticated(
                f"who listens at {name} is not rank 0 of this group: {failure}; pass the same "
                "--group-token-file on all hosts",
                reason="GROUP_TOKEN",
                param="group_token_file",
            ) from failure
        except (OSError, LinkLost) as failure:
            _drop(sock)
            why, now = str(failure), time.monotonic()
        if now - began > post.patience_s:
            raise Unavailable(f"rank 0 does not answer at {name}: {why}", reason="RANKS_MISSING")
        if now - said > _SAY_EVERY_S:
            said = now
            _LOG.info("waiting for rank 0 at %s: %s", name, why)
        time.sleep(_AGAIN_S)


def _drop(sock: socket.socket | None) -> None:
    if sock is not None:
        sock.close()


def _name(post: Post) -> str:
    host, port = post.leader
    return f"{host}:{port}"


def follow_rank_0(post: Post, on_welcome: Callable[[], object] = lambda: None) -> int:
    """Joins and runs the rank; returns the exit status."""
    log.configure(post.log_level, service=f"host of rank{post.rank}")
    try:
        link, num_ranks = join(post)
    except ServiceError as error:
        _LOG.error("rank %d: %s", post.rank, error)
        return 1
    on_welcome()
    return Far(link, post.rank, num_ranks, post.module).run()


def main(argv: list[str]) -> int:
    """Returns the exit status. A signal to stop ends who is not welcome yet; a rank that runs ends
    when rank 0 does, which may have requests to finish."""
    state, parent_pid = map(int, argv)
    die_with(parent_pid)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: os._exit(1))
    with os.fdopen(state, "rb") as told_by:
        told = json.loads(told_by.read())
    told["leader"] = tuple(told["leader"])
    return follow_rank_0(Post(**told), ignore_stop_signals)


if __name__ == "__main__":
    status = main(sys.argv[1:])
    logging.shutdown()
    os._exit(status)

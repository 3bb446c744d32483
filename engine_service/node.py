"""What `tidemill engine` does on all hosts of a group but the first: it runs ranks, serves nobody.

It does not know what ranks compute.
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import subprocess

from engine_service.child import pipe_of, start_child
from engine_service.config import EngineConfig
from engine_service.nodes import Node, read_token
from engine_service.ranks.far import Post
from engine_service.ranks.gathering import PATIENCE_S
from engine_service.ranks.likeness import likeness
from tidemill.runtime.endings import ending

FAR_MODULE = "engine_service.ranks.far"
_LAST_S = 5.0
"""For the others when one rank has left because all is over."""
_LOG = logging.getLogger("tidemill.engine")


class NodeRanks:
    """The ranks of one node, each behind a process that stands for rank 0."""

    def __init__(self, config: EngineConfig, node: Node, *, module: str = FAR_MODULE) -> None:
        """Starts them; they wait for rank 0 then. Raises FailedPrecondition without a token."""
        secret = read_token(config).hex()
        self._told = False
        self._ranks: dict[int, subprocess.Popen[bytes]] = {}
        for index, rank in enumerate(node.ranks):
            post = Post(
                leader=node.leader,
                secret=secret,
                rank=rank,
                local_rank=node.local_rank + index,
                local_size=node.local_size,
                likeness=likeness(config),
                patience_s=PATIENCE_S,
                log_level=config.log_level,
            )
            self._ranks[rank] = _start(module, post)

    def run(self) -> int:
        """Until rank 0 ends, or one of these does; the exit status."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._signalled)
        poll = select.poll()
        by_fd = {os.pidfd_open(child.pid): rank for rank, child in self._ranks.items()}
        for fd in by_fd:
            poll.register(fd, select.POLLIN)
        status, left_ms = 0, None
        while by_fd and (found := poll.poll(left_ms)):
            for fd, _ in found:
                rank = by_fd.pop(fd)
                poll.unregister(fd)
                os.close(fd)
                code = self._ranks[rank].wait()
                level = logging.ERROR if code else logging.INFO
                _LOG.log(level, "rank %d %s", rank, ending(code))
                status |= int(code != 0)
                left_ms = 0 if status else _LAST_S * 1e3
        for child in self._ranks.values():
            child.kill()
            child.wait()
        for fd in by_fd:
            os.close(fd)
        return int(status or bool(by_fd))

    def _signalled(self, *_: object) -> None:
        """The first signal ends who still waits for rank 0; running ranks wait for its end."""
        if self._told:
            _LOG.warning("a second signal: ending now")
            for child in self._ranks.values():
                child.kill()
            return
        self._told = True
        _LOG.info("running ranks end with rank 0; a second signal ends them now")
        for child in self._ranks.values():
            child.send_signal(signal.SIGTERM)


def _start(module: str, post: Post) -> subprocess.Popen[bytes]:
    state = pipe_of(json.dumps(post._asdict()).encode())
    try:
        return start_child(module, fds=[state])
    finally:
        os.close(state)

"""Renders conversations in processes of their own (template_worker) and outlives what they do.

It owns those processes. It does not know tokens or requests.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import multiprocessing.forkserver
import pickle
import socket
import time
from collections import deque
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import cast

from frontend.request import Chat
from frontend.template import ChatTemplate
from frontend.template_worker import BEGUN, HEAD, MEMORY_BYTES, READY, TEXT, TOO_LONG, serve
from tidemill.runtime.errors import InternalError, InvalidRequest, Overloaded, Unavailable

_RENDERER = "transformers.utils.chat_template_utils"
MAX_WORKERS = 4
MOST_CHARS = 16 << 20
_CPU_S = 2.0
"""For one conversation. One of 4 MB takes some hundredths of it."""
_STUCK_S = 0.1
"""Behind a conversation that has taken so long nobody else is put."""
_MOST_WAITING_BYTES = 64 << 20
_FAILED_STARTS = 3
"""Workers in a row that do not come up: then none is started for a while."""
_PAUSE_S = 30.0
"""That while: what the machine lacked (memory, files) it may have again."""
_START_S = 60.0
"""For a worker to come up; on a slow machine it loads its library for some seconds."""
_MOST_SENT = 3
"""Workers that a conversation is sent to, of which none began with it."""
_LOG = logging.getLogger("tidemill.frontend")


@dataclass(slots=True, eq=False)
class _Job:
    content: bytes
    done: asyncio.Future[str]
    num_sent: int = 0


class _Worker(asyncio.Protocol):
    """Our end of one process: jobs are answered in the order in which they were sent."""

    def __init__(self, pool: TemplatePool, process: BaseProcess) -> None:
        self.jobs: deque[_Job] = deque()
        self.num_bytes = 0
        """Of the jobs, those of clients that have left among them."""
        self._pool = pool
        self._process = process
        self._since = 0.0
        self._received = b""
        self.has_begun = False
        """With the job at the head."""
        self.ready: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        """Whether it came up."""
        self.is_lost = False

    @property
    def is_stuck(self) -> bool:
        """Whether the job at the head has taken long."""
        return bool(self.jobs) and time.monotonic() - self._since > _STUCK_S

    def send(self, job: _Job) -> None:
        """Has the job done, behind those that were sent before."""
        if not self.jobs:
            self._since = time.monotonic()
        self.jobs.append(job)
        self.num_bytes += len(job.content)
        job.num_sent += 1
        self._transport.write(HEAD.pack(len(job.content), 0) + job.content)

    def close(self) -> None:
        """Ends the process."""
        self._transport.abort()
        self._process.kill()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.WriteTransport", transport)

    def data_received(self, chunk: bytes) -> None:
        seen, at = self._received + chunk, 0
        while len(seen) - at >= HEAD.size:
            size, kind = HEAD.unpack_from(seen, at)
            end = at + HEAD.size + size
            if len(seen) < end:
                break
            self._since = time.monotonic()
            if kind == READY:
                if not self.ready.done():
                    self.ready.set_result(True)
            elif kind == BEGUN:
                self.has_begun = True
            else:
                self.has_begun = False
                job = self.jobs.popleft()
                self.num_bytes -= len(job.content)
                self._pool.answered(job, kind, seen[at + HEAD.size : end])
            at = end
        self._received = seen[at:]

    def connection_lost(self, failure: Exception | None) -> None:
        self.is_lost = True
        if not self.ready.done():
            self.ready.set_result(False)
        self._pool.lost(self)


def prepare() -> None:
    """Returns at once, and has loaded what workers need by and by: they are forked from there."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([serve.__module__, _RENDERER])
    multiprocessing.forkserver.ensure_running()


class TemplatePool:
    """Workers for one template. A conversation that costs its worker the life is refused; those
    behind it are rendered by another one."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._workers: list[_Worker] = []
        self._starting: asyncio.Task[None] | None = None
        self._num_unsent_bytes = 0
        self._num_failed = 0
        self._failed_at = 0.0
        self._is_closed = False

    async def start(self) -> None:
        """Brings up the first worker, so that no request has to wait for it."""
        await self._free_worker()

    async def render(self, chat: Chat) -> str:
        """The prompt's text.

        Raises InvalidRequest when the template refuses the messages or takes more than it may,
        Overloaded when too much waits already.
        """
        self._template.check(chat)
        num_bytes = self._num_unsent_bytes + sum(one.num_bytes for one in self._workers)
        if num_bytes > _MOST_WAITING_BYTES:
            raise Overloaded(
                "too many conversations wait for the chat template; try again shortly",
                reason="TEMPLATE_BUSY",
                retry_after_ms=1000,
            )
        job = _Job(pickle.dumps(chat), asyncio.get_running_loop().create_future())
        await self._send(job)
        return await job.done

    async def close(self) -> None:
        """Ends the processes; idempotent."""
        self._is_closed = True
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.wait({self._starting})
        for worker in self._workers:
            worker.close()

    def answered(self, job: _Job, kind: int, answer: bytes) -> None:
        """A worker has dealt with a job, whose client may have left."""
        if job.done.done():
            return
        if kind == TEXT:
            job.done.set_result(answer.decode("utf-8", "surrogatepass"))
        elif kind == TOO_LONG:
            job.done.set_exception(_too_much(f"writes more than {MOST_CHARS:,} characters"))
        else:
            job.done.set_exception(InvalidRequest(answer.decode(), param="messages"))

    def lost(self, worker: _Worker) -> None:
        """A worker has ended: at the hands of the job at its head, if it had begun with it."""
        if worker in self._workers:
            self._workers.remove(worker)
        if self._is_closed:  # the end is ours: nobody's conversation is at fault
            for job in worker.jobs:
                if not job.done.done():
                    job.done.set_exception(_closed())
            return
        if worker.jobs and (worker.has_begun or worker.jobs[0].num_sent >= _MOST_SENT):
            head = worker.jobs.popleft()
            limits = f"{_CPU_S:g} s of the CPU or {MEMORY_BYTES >> 20} MiB of memory"
            over = _too_much(f"takes more than {limits}")
            if not head.done.done():
                head.done.set_exception(over if worker.has_begun else _no_worker())
        for job in worker.jobs:
            again = asyncio.ensure_future(self._send_again(job))
            job.done.add_done_callback(lambda _, again=again: again.cancel())  # type: ignore[misc]

    async def _send(self, job: _Job) -> None:
        """To a worker, as soon as there is one for it."""
        self._num_unsent_bytes += len(job.content)
        try:
            worker = await self._free_worker()
        finally:
            self._num_unsent_bytes -= len(job.content)
        worker.send(job)

    async def _send_again(self, job: _Job) -> None:
        try:
            await self._send(job)
        except Exception as failure:  # of the system, too: somebody waits for this job
            if not job.done.done():
                job.done.set_exception(failure)

    async def _free_worker(self) -> _Worker:
        """The one with the fewest jobs of those that are not stuck, or a new one."""
        while True:
            if self._is_closed:
                raise _closed()
            able = [worker for worker in self._workers if not worker.is_stuck]
            if not able and self._workers:  # it may be this process that was away: hear them first
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                able = [worker for worker in self._workers if not worker.is_stuck]
            if not able and len(self._workers) == MAX_WORKERS:
                able = self._workers
            if able:
                return min(able, key=lambda worker: len(worker.jobs))
            is_pause = time.monotonic() - self._failed_at < _PAUSE_S
            if self._num_failed >= _FAILED_STARTS and is_pause:
                raise _no_worker()
            if self._starting is None or self._starting.done():
                self._starting = asyncio.create_task(self._add_worker())
            starting = self._starting
            await asyncio.wait({starting})
            if not starting.cancelled():
                starting.result()  # may raise: all that wait for the worker hear of it

    async def _add_worker(self) -> None:
        """Counts whether one came up. Raises what the system has against it."""
        prepare()
        try:
            async with asyncio.timeout(_START_S):
                worker = await self._started()
        except TimeoutError:
            _LOG.warning("a process for the chat template is not ready after %g s", _START_S)
            worker = None
        if worker is not None:
            self._num_failed = 0
            self._workers.append(worker)
        else:
            self._num_failed, self._failed_at = self._num_failed + 1, time.monotonic()

    async def _started(self) -> _Worker | None:
        """A worker that has come up; whoever gives up waiting for it leaves none behind."""
        context = multiprocessing.get_context("forkserver")
        ours, theirs = socket.socketpair()
        arguments = (theirs, self._template, _CPU_S, MOST_CHARS)
        process = context.Process(target=serve, args=arguments, daemon=True)
        try:
            await asyncio.to_thread(_start, process, theirs)  # the first waits for what is loaded
        except BaseException:
            ours.close()  # which ends the process, should it come up yet
            raise
        worker = _Worker(self, process)
        await asyncio.get_running_loop().create_unix_connection(lambda: worker, sock=ours)
        try:
            is_up = await worker.ready and not worker.is_lost
        except BaseException:
            worker.close()
            raise
        return worker if is_up else None


def _start(process: BaseProcess, theirs: socket.socket) -> None:
    with theirs:
        process.start()


def _no_worker() -> InternalError:
    return InternalError("the chat template's process has ended; see the log")


def _closed() -> Unavailable:
    """Of a pool that ends with its server, or for another model's."""
    return Unavailable(
        "the chat template's process was ended, for this server stops or serves another model now; "
        "try again shortly",
        retry_after_ms=1000,
    )


def _too_much(what: str) -> InvalidRequest:
    return InvalidRequest(
        f"the chat template {what} for these messages; send other ones, or start the server with "
        "another template (--chat-template)",
        reason="TEMPLATE_LIMIT",
        param="messages",
    )

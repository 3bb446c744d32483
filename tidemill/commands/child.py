"""One service as a child process that cannot outlive us. It does not know which service."""

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence

_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1
_LINE_BYTES = 16 << 20


class Child:
    """A running `python -m MODULE`, and the task that reads its stderr."""

    def __init__(
        self, module: str, process: asyncio.subprocess.Process, reading: asyncio.Task[None]
    ) -> None:
        self.module = module
        self._process = process
        self._reading = reading

    @classmethod
    async def start(
        cls,
        module: str,
        argv: Sequence[str],
        *,
        environ: Mapping[str, str],
        on_line: Callable[[str], None],
    ) -> "Child":
        """`on_line` hears every line of its stderr.

        A session of its own keeps Ctrl-C for us, who then stop the services in order. Threads of
        gRPC may run here: what is forked calls one function of libc before it becomes another
        program, and nothing of theirs.
        """
        ours = os.getpid()
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", module, *argv),
            stdin=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            limit=_LINE_BYTES,
            env=environ,
            start_new_session=True,
            preexec_fn=lambda: _follow_into_death(ours),
        )
        return cls(module, process, asyncio.create_task(_read(process, on_line)))

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.returncode is None

    async def wait(self) -> int:
        """Its exit status, negative for a signal, once it has ended and its lines are read."""
        code = await self._process.wait()
        await asyncio.wait({self._reading}, timeout=1.0)
        return code

    async def stop(self, timeout_s: float) -> None:
        """SIGTERM, and SIGKILL to all that it started when the time is up."""
        if self._process.returncode is None:
            self._process.terminate()
        try:
            async with asyncio.timeout(timeout_s):
                await self.wait()
        except TimeoutError:
            self.kill()
            await self.wait()

    def kill(self) -> None:
        """Ends it and everything it started, at once."""
        if self._process.returncode is None:
            # It may have ended just now, which is told a turn of the event loop later.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)


def _follow_into_death(parent: int) -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it died before the call above
        os._exit(1)


async def _read(process: asyncio.subprocess.Process, on_line: Callable[[str], None]) -> None:
    assert process.stderr is not None
    while True:
        try:
            line = await process.stderr.readline()
        except ValueError:  # it is dropped; who stopped reading here would stop the service too
            line = b"(a part of a line of more than %d bytes is left out)\n" % _LINE_BYTES
        if not line:
            return
        on_line(line.decode(errors="replace").rstrip())

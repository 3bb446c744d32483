"""The process in which chat templates run: a template is a program of whoever made the model.

Whatever it computes, it opens no file, holds a bounded amount of memory and ends in a bounded time:
the kernel sees to that, and kills the process if need be. It answers one conversation after the
other and does not know what becomes of them.
"""

from __future__ import annotations

import gc
import pickle
import resource
import signal
import socket
import struct
from contextlib import suppress
from pathlib import Path

from frontend.request import Chat
from frontend.template import ChatTemplate
from tidemill.runtime.errors import InvalidRequest

HEAD = struct.Struct("<IB")
"""Of every frame: its length, and of answers their kind."""
READY, BEGUN, TEXT, REFUSED, TOO_LONG = range(5)
MEMORY_BYTES = 1 << 30
_MOST_MESSAGE_CHARS = 1000
_SAMPLE = "{{ messages | tojson }}{{ strftime_now('%d') }}{% for m in messages %}{% endfor %}"


def serve(connection: socket.socket, template: ChatTemplate, cpu_s: float, chars: int) -> None:
    """Renders what comes through `connection` until its other end is closed.

    It says when it is ready, and of each frame, a pickled Chat, that it begins. An answer is
    the text or why it was refused. A text of more than `chars` characters is refused; taking more
    than `cpu_s` of the CPU ends the process without an answer.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the frontend to deal with
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    _shut_in()
    with connection, connection.makefile("rb") as frames:
        connection.sendall(HEAD.pack(0, READY))
        while head := frames.read(HEAD.size):
            content = frames.read(HEAD.unpack(head)[0])
            connection.sendall(HEAD.pack(0, BEGUN))
            signal.setitimer(signal.ITIMER_PROF, cpu_s)
            kind, answer = _rendered(template, pickle.loads(content), chars)
            signal.setitimer(signal.ITIMER_PROF, 0)
            connection.sendall(HEAD.pack(len(answer), kind) + answer)


def _rendered(template: ChatTemplate, chat: Chat, chars: int) -> tuple[int, bytes]:
    try:
        text = template.render(chat)
    except InvalidRequest as error:
        return REFUSED, error.message[:_MOST_MESSAGE_CHARS].encode("utf-8", "replace")
    if len(text) > chars:
        return TOO_LONG, b""
    return TEXT, text.encode("utf-8", "surrogatepass")


def _shut_in() -> None:
    """Loads what rendering loads, and what a template's error does, then takes from this process
    what a template may not have."""
    hello = Chat(messages=[{"role": "user", "content": "."}])
    ChatTemplate(_SAMPLE, {}).render(hello)
    with suppress(InvalidRequest):
        ChatTemplate("{{ raise_exception('.') }}", {}).render(hello)
    gc.freeze()
    limits = [(resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0)]
    statm = Path("/proc/self/statm")
    if statm.exists():  # elsewhere than on Linux nothing bounds the memory that one may map
        mapped = int(statm.read_text().split()[0]) * resource.getpagesize()
        limits.append((resource.RLIMIT_AS, mapped + MEMORY_BYTES))
    for limit, most in (*limits, (resource.RLIMIT_NOFILE, 0)):
        hard = resource.getrlimit(limit)[1]
        bounded = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(limit, (bounded, bounded))

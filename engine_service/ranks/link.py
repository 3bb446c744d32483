"""Frames between two processes on two hosts that hold the same secret.

Both prove that they know it (HMAC-SHA256 over what each has just drawn) before either reads
anything else. Every frame behind that carries its number and an HMAC under a key of this
connection, so nothing is passed on that the other side has not said in this order. Nothing is
encrypted: plans show token ids. It does not know what the frames say.
"""

from __future__ import annotations

import hmac
import json
import secrets
import select
import socket
import struct
import threading
from collections.abc import Iterator

_MAGIC = b"tidemil1"
"""Who knocks is one of us; another number when the handshake changes."""
_NONCE = _PROOF = 32
_MAC = 16
_HEAD = struct.Struct("<BIQ")  # kind, bytes, sequence number
_MORE = 0x80
_PIECE = 1 << 20
"""A longer message goes in pieces, so no size is taken on trust and none is too large."""
_HANDSHAKE_S = 5.0
_KEEPALIVE = {socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}
"""Seconds and probes: who waits for the others to come says nothing, and its host may be lost."""


class LinkLost(Exception):
    """The other side is gone, or what came is not of it."""


class NotOneOfUs(Exception):
    """The other side does not know the secret, or speaks something else."""


class Link:
    """`send` from any thread, `receive` from one."""

    def __init__(
        self,
        sock: socket.socket,
        sends: bytes,
        receives: bytes,
        *,
        num_sent: int = 0,
        num_received: int = 0,
    ) -> None:
        """`sends` and `receives` are the keys of the two directions."""
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE.items():
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
        self._sock = sock
        self._sends, self._receives = sends, receives
        self._num_sent = num_sent
        self.num_received = num_received
        self._sending = threading.Lock()
        self._offered: tuple[int, bytes] | None = None
        self._begun: dict[int, list[bytes]] = {}
        """Pieces that have come of messages, by kind."""

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, kind: int, payload: bytes = b"") -> None:
        """Blocks while the other side reads too slowly; raises LinkLost."""
        with self._sending:
            self._send(kind, payload)

    def offer(self, kind: int, payload: bytes) -> bool:
        """`send` of a few bytes without waiting, for who has something else to look after; raises
        LinkLost. False: they go between two pieces of what is on its way, or nowhere if there are
        none to come; the next offer replaces them. What is of their kind is never in pieces."""
        self._offered = (kind, payload)
        if not self._sending.acquire(blocking=False):
            return False
        try:
            self._offered = None
            poll = select.poll()
            poll.register(self._sock, select.POLLOUT)
            if not poll.poll(0):
                return False
            self._send(kind, payload)
        finally:
            self._sending.release()
        return True

    def receive(self) -> tuple[int, bytes]:
        """The next message, (kind, payload); waits for it. Raises LinkLost."""
        while True:
            head = _exactly(self._sock, _HEAD.size + _MAC)
            kind, size, seq = _HEAD.unpack_from(head)
            if size > _PIECE:
                raise LinkLost(f"a frame of {size} bytes; none has more than {_PIECE}")
            piece = _exactly(self._sock, size)
            mac = hmac.digest(self._receives, head[: _HEAD.size] + piece, "sha256")[:_MAC]
            if not hmac.compare_digest(mac, head[_HEAD.size :]):
                raise LinkLost("a frame that the other side has not made")
            if seq != self.num_received:
                raise LinkLost(f"frame {seq} came where {self.num_received} was due")
            self.num_received += 1
            if not kind & _MORE:
                return kind, b"".join([*self._begun.pop(kind, ()), piece])
            self._begun.setdefault(kind & ~_MORE, []).append(piece)

    def _send(self, kind: int, payload: bytes) -> None:
        for more, piece in _pieces(payload):
            self._send_frame(kind | more, piece)
            if more and self._offered:
                offered, self._offered = self._offered, None
                self._send_frame(*offered)

    def _send_frame(self, kind: int, piece: bytes) -> None:
        head = _HEAD.pack(kind, len(piece), self._num_sent)
        mac = hmac.digest(self._sends, head + piece, "sha256")[:_MAC]
        try:
            self._sock.sendall(head + mac + piece)
        except OSError as failure:
            raise LinkLost(_words(failure)) from failure
        self._num_sent += 1

    def hand_over(self) -> bytes:
        """What `take_over` needs in a process that inherits the socket. Keys: keep it in memory."""
        keys = {"sends": self._sends.hex(), "receives": self._receives.hex()}
        counts = {"num_sent": self._num_sent, "num_received": self.num_received}
        return json.dumps({**keys, **counts}).encode()

    @classmethod
    def take_over(cls, fd: int, state: bytes) -> Link:
        """The link that another process has handed over with its socket."""
        told = json.loads(state)
        keys = (bytes.fromhex(told.pop(name)) for name in ("sends", "receives"))
        return cls(socket.socket(fileno=fd), *keys, **told)

    def close(self) -> None:
        self._sock.close()

    def shut(self) -> None:
        """Wakes who receives, here and there."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it is shut already


def knock(sock: socket.socket, secret: bytes) -> Link:
    """Of who has connected. Raises NotOneOfUs if the other side does not prove itself first, and
    LinkLost."""
    sock.settimeout(_HANDSHAKE_S)
    ours = secrets.token_bytes(_NONCE)
    _send(sock, _MAGIC + ours)
    answer = _exactly(sock, _NONCE + _PROOF)
    drawn = ours + answer[:_NONCE]
    if not hmac.compare_digest(answer[_NONCE:], _derive(secret, b"near proof", drawn)):
        raise NotOneOfUs("it has another secret")
    _send(sock, _derive(secret, b"far proof", drawn))
    return Link(sock, _derive(secret, b"to near", drawn), _derive(secret, b"to far", drawn))


def answer(sock: socket.socket, secret: bytes) -> Link:
    """Of who was connected to; raises what `knock` raises. Takes at most some seconds."""
    sock.settimeout(_HANDSHAKE_S)
    hello = _exactly(sock, len(_MAGIC) + _NONCE)
    if not hello.startswith(_MAGIC):
        raise NotOneOfUs("it does not speak as a rank of this version does")
    ours = secrets.token_bytes(_NONCE)
    drawn = hello[len(_MAGIC) :] + ours
    _send(sock, ours + _derive(secret, b"near proof", drawn))
    try:
        proof = _exactly(sock, _PROOF)
    except LinkLost as failure:
        raise NotOneOfUs(f"it left when it was to prove itself ({failure})") from failure
    if not hmac.compare_digest(proof, _derive(secret, b"far proof", drawn)):
        raise NotOneOfUs("it has another secret")
    return Link(sock, _derive(secret, b"to far", drawn), _derive(secret, b"to near", drawn))


def _derive(secret: bytes, what_for: bytes, drawn: bytes) -> bytes:
    return hmac.digest(secret, what_for + b"\0" + drawn, "sha256")


def _pieces(payload: bytes) -> Iterator[tuple[int, bytes]]:
    if len(payload) <= _PIECE:
        yield 0, payload
        return
    for start in range(0, len(payload), _PIECE):
        stop = start + _PIECE
        yield _MORE if stop < len(payload) else 0, payload[start:stop]


def _send(sock: socket.socket, words: bytes) -> None:
    try:
        sock.sendall(words)
    except OSError as failure:
        raise LinkLost(_words(failure)) from failure


def _exactly(sock: socket.socket, count: int) -> bytes:
    found = bytearray()
    while len(found) < count:
        try:
            chunk = sock.recv(count - len(found))
        except OSError as failure:
            raise LinkLost(_words(failure)) from failure
        if not chunk:
            raise LinkLost("the other side has closed it")
        found += chunk
    return bytes(found)


def _words(failure: OSError) -> str:
    return failure.strerror or str(failure) or type(failure).__name__

"""Clients that ask for a stream and then hardly read it, or vanish. They do not know the server.

As a program it does a step for each line it is sent (open, read, vanish) and says when it is done.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import sys
from contextlib import suppress
from typing import Any

import grpc

from tidemill.v1 import text_pb2, text_pb2_grpc

_LITTLE = 2048
_AT_ONCE = 50
"""Connections that are opened at the same time: more would wait for the listener to accept them."""


class AbsentReaders:
    """Half of the clients speak HTTP, each on a connection of its own, half gRPC, 50 on one
    connection; each asks for `tokens` tokens with log-probabilities, which are long."""

    def __init__(self, host: str, http_port: int, grpc_port: int, tokens: int) -> None:
        self._http, self._grpc = (host, http_port), f"{host}:{grpc_port}"
        self._tokens = tokens
        self._sockets: list[socket.socket] = []
        self._channels: list[grpc.aio.Channel] = []
        self._calls: list[Any] = []

    async def open(self, count: int) -> None:
        """Sends the requests of `count` more."""
        half = count // 2
        for begun in range(0, half, _AT_ONCE):
            size = min(_AT_ONCE, half - begun)
            await asyncio.gather(*(self._open_http() for _ in range(size)))
            await self._open_grpc(size)

    async def read_a_little(self, count: int) -> None:
        """Some bytes of the first `count` HTTP streams, and the first message of as many calls."""
        loop = asyncio.get_running_loop()
        for one in self._sockets[:count]:
            assert await loop.sock_recv(one, 100), "the server has closed the connection"
        for call in self._calls[:count]:
            assert await call.read() is not grpc.aio.EOF

    async def vanish(self) -> None:
        """Half of all go away without a word (a reset connection), half as clients do (a closed
        connection, a cancelled call)."""
        for number, one in enumerate(self._sockets):
            if number % 2:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            one.close()
        for call in self._calls[::2]:
            call.cancel()
        for channel in self._channels:
            await channel.close()
        for call in self._calls:
            with suppress(grpc.RpcError, asyncio.CancelledError):
                await call.code()

    async def _open_http(self) -> None:
        body = {
            "prompt": "ab",
            "max_tokens": self._tokens,
            "logprobs": 5,
            "ignore_eos": True,
            "stream": True,
        }
        content = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: {len(content)}\r\n\r\n"
        one = socket.socket()
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _LITTLE)
        one.setblocking(False)
        self._sockets.append(one)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(one, self._http)
        await loop.sock_sendall(one, head.encode() + content)

    async def _open_grpc(self, count: int) -> None:
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.http2.lookahead_bytes", _LITTLE)]
        channel = grpc.aio.insecure_channel(self._grpc, options)
        self._channels.append(channel)
        # Else all of HTTP's requests would be there first, and these would wait for their rows.
        await channel.channel_ready()
        request = text_pb2.GenerateStreamRequest()
        request.prompt.text = "ab"
        request.options.sampling.max_tokens = self._tokens
        request.options.logprobs.top = 5
        request.options.ignore_eos = True
        stub = text_pb2_grpc.TextServiceStub(channel)
        self._calls += [stub.GenerateStream(request) for _ in range(count)]


async def main(host: str, http_port: int, grpc_port: int, tokens: int) -> None:
    absent = AbsentReaders(host, http_port, grpc_port, tokens)
    while line := await asyncio.to_thread(sys.stdin.readline):
        word, *rest = line.split()
        if word == "open":
            await absent.open(int(rest[0]))
        elif word == "read":
            await absent.read_a_little(int(rest[0]))
        else:
            await absent.vanish()
        print(word, flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], *map(int, sys.argv[2:])))

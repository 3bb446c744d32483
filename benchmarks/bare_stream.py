"""What a gRPC stream of Python costs its server when it does nothing else: CPU time per message.

    python -m benchmarks.bare_stream [--bytes 1800] [--every-ms 5] [--messages 1000]

A child process writes to a pipe at that pace, as a core does, and the server's event loop sends a
message for every word of it. `tidemill bench stack` has such a message per step of 256 rows.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import uvloop

_PACE = """
import os, sys, time
due = time.perf_counter()
for _ in range(int(sys.argv[2])):
    due += float(sys.argv[1])
    time.sleep(max(0.0, due - time.perf_counter()))
    os.write(1, b"x" * 1100)
"""
_READ = """
import grpc, sys
for _ in grpc.insecure_channel(sys.argv[1]).unary_stream("/bare/Go")(b""):
    pass
"""
_WARM = 50
"""Messages before the clock starts."""


class Bare:
    """Serves one stream and measures it."""

    def __init__(self, size: int, every_s: float, messages: int) -> None:
        self._message, self._every_s, self._messages = b"y" * size, every_s, messages
        self.us_per_message = asyncio.get_running_loop().create_future()

    async def go(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        pace = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", _PACE, str(self._every_s), str(_WARM + self._messages)),
            stdout=subprocess.PIPE,
        )
        assert pace.stdout is not None
        began, sent = 0.0, 0
        while await pace.stdout.read(1 << 16):
            sent += 1
            if sent == _WARM:
                began = time.process_time()
            yield self._message
        took = time.process_time() - began
        # Of a machine that stood still several words come at once.
        many = sent > _WARM + self._messages // 2
        self.us_per_message.set_result(took / (sent - _WARM) * 1e6 if many else math.nan)


async def measure(options: argparse.Namespace) -> float:
    bare = Bare(options.bytes, options.every_ms / 1e3, options.messages)
    server = grpc.aio.server()
    handlers = {"Go": grpc.unary_stream_rpc_method_handler(bare.go)}
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("bare", handlers)])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    reader = await asyncio.create_subprocess_exec(sys.executable, "-c", _READ, f"127.0.0.1:{port}")
    found: float = await bare.us_per_message
    await reader.wait()
    await server.stop(0)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bytes", type=int, default=1800)
    parser.add_argument("--every-ms", type=float, default=5.0)
    parser.add_argument("--messages", type=int, default=1000)
    print(f"{uvloop.run(measure(parser.parse_args())):.0f} us of CPU a message")


if __name__ == "__main__":
    main()

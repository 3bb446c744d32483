"""A server that answers everything with 200 and nothing in it, over HTTP and gRPC."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc


class _Empty(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    do_POST = do_DELETE = do_GET

    def log_message(self, *args: object) -> None:
        pass


class _Nothing(grpc.GenericRpcHandler):
    def service(self, details: Any) -> Any:
        """Streams without a message; a unary call gets an empty one."""
        if details.method.endswith("Stream"):
            return grpc.unary_stream_rpc_method_handler(lambda asked, context: iter(()))
        answer: Callable[..., bytes] = lambda asked, context: b""  # noqa: E731
        return grpc.unary_unary_rpc_method_handler(answer)


@contextmanager
def impostor() -> Iterator[tuple[str, str]]:
    """Its URL, and host:port of its gRPC face."""
    web = ThreadingHTTPServer(("127.0.0.1", 0), _Empty)
    threading.Thread(target=web.serve_forever, daemon=True).start()
    rpc = grpc.server(ThreadPoolExecutor(2), handlers=[_Nothing()])
    port = rpc.add_insecure_port("127.0.0.1:0")
    rpc.start()
    try:
        yield f"http://127.0.0.1:{web.server_port}", f"127.0.0.1:{port}"
    finally:
        rpc.stop(None)
        web.shutdown()
        web.server_close()

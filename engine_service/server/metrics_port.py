"""The engine's HTTP port for scrapes and probes, on threads of its own.

A probe is answered however busy the event loop is, and in plain text where the gRPC port wants
certificates. It does not know what the numbers mean.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
from collections.abc import Callable, Iterable
from socketserver import TCPServer, ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from tidemill.runtime.errors import FailedPrecondition

Page = Callable[[str], tuple[int, bytes, str]]
"""From the Accept header to status, body and content type."""
_REASONS = {200: "OK", 404: "Not Found", 405: "Method Not Allowed", 503: "Service Unavailable"}
_IDLE_S = 10.0
"""A connection that says nothing for so long is closed."""
_LOG = logging.getLogger("tidemill.engine.http")


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def server_bind(self) -> None:
        """Without the library's look-up of the host's name, which may wait for DNS."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = self.socket.getsockname()[:2]
        self.setup_environ()

    def finish_request(self, request: Any, client_address: Any) -> None:
        """A client that says nothing, or breaks off, is no news: the library prints a traceback for
        each."""
        try:
            super().finish_request(request, client_address)
        except OSError as failure:
            _LOG.debug("a connection of %s has broken off: %s", client_address[0], failure)


class _ServerV6(_Server):
    address_family = socket.AF_INET6


class _Handler(WSGIRequestHandler):
    timeout = _IDLE_S

    def log_message(self, format: str, *args: Any) -> None:
        """Scrapes and probes are no news."""


class MetricsPort:
    """Serves `pages`, by path, until it is closed. `port` is the bound one."""

    def __init__(self, host: str, port: int, pages: dict[str, Page]) -> None:
        """Raises FailedPrecondition when the port is taken."""
        self._pages = pages
        kind = _ServerV6 if ":" in host else _Server
        try:
            self._server = make_server(host, port, self._answer, kind, _Handler)
        except OSError as failure:
            raise FailedPrecondition(
                f"cannot listen on {host}:{port}: {failure.strerror}; stop the other process or "
                "choose another port with --metrics-port (0 takes a free one)",
                reason="PORT_IN_USE",
                param="--metrics-port",
            ) from failure
        self.port = self._server.server_port
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="metrics", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Takes no more requests; blocks for as long as one poll of the socket."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _answer(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        page = self._pages.get(environ["PATH_INFO"])
        if page is None:
            known = ", ".join(self._pages)
            status, body, kind = 404, f"there are: {known}\n".encode(), "text/plain"
        elif environ["REQUEST_METHOD"] != "GET":
            status, body, kind = 405, b"GET only\n", "text/plain"
        else:
            status, body, kind = page(environ.get("HTTP_ACCEPT", ""))
        headers = [("Content-Type", kind), ("Content-Length", str(len(body)))]
        if status == 503:
            headers.append(("Retry-After", "1"))
        start(f"{status} {_REASONS[status]}", headers)
        return [body]


def json_page(status: int, content: dict[str, Any]) -> tuple[int, bytes, str]:
    """A page of JSON."""
    return status, json.dumps(content).encode(), "application/json"

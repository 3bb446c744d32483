"""The engine's HTTP port does not mind clients that say nothing, or break off."""

from __future__ import annotations

import logging
import socket
import struct
from http.client import HTTPConnection

import pytest

from engine_service.server import metrics_port
from engine_service.server.metrics_port import MetricsPort
from tests.waiting import PATIENCE_S

RESET = struct.pack("ii", 1, 0)
"""Of SO_LINGER: whoever closes the connection cuts it."""


def test_a_client_that_breaks_off_or_says_nothing_costs_no_traceback(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(metrics_port._Handler, "timeout", 0.05)
    caplog.set_level(logging.DEBUG, "tidemill.engine.http")
    port = MetricsPort("127.0.0.1", 0, {"/live": lambda accept: (200, b"ok", "text/plain")})
    place = ("127.0.0.1", port.port)
    try:
        with socket.create_connection(place, PATIENCE_S) as silent:
            assert silent.recv(1) == b"", "the port has something to say"
        with socket.create_connection(place, PATIENCE_S) as leaving:
            leaving.sendall(b"GET /live HTTP/1.1\r\n")
            leaving.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        asking = HTTPConnection(*place, timeout=PATIENCE_S)
        asking.request("GET", "/live")
        assert asking.getresponse().read() == b"ok"
        asking.close()
    finally:
        port.close()
    assert "Traceback" not in capfd.readouterr().err
    assert "has broken off" in caplog.text

"""One `tidemill serve demo` as a user starts it, and what can be counted in it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import grpc
import httpx

from tests.e2e.test_serve import SEEDED, free_ports, serve
from tests.waiting import PATIENCE_S
from tidemill.v1 import engine_pb2, engine_pb2_grpc


class Demo(NamedTuple):
    """Its addresses, as host:port."""

    http: str
    grpc: str
    engine: str

    @property
    def url(self) -> str:
        return f"http://{self.http}"

    def num_cancelled(self) -> int:
        """Requests whose clients went away, as the frontend counts them."""
        text = httpx.get(f"{self.url}/metrics", timeout=PATIENCE_S).text
        found = re.search(
            r'^tidemill_request_failure_total{error_type="cancelled".*} (\S+)', text, re.M
        )
        return int(float(found[1])) if found else 0

    def state(self) -> engine_pb2.WatchStateResponse:
        """The engine's snapshot of this moment."""
        with grpc.insecure_channel(self.engine) as channel:
            stub = engine_pb2_grpc.EngineInfoServiceStub(channel)
            call = stub.WatchState(engine_pb2.WatchStateRequest(), timeout=PATIENCE_S)
            return next(call)

    def is_idle(self) -> bool:
        """Whether nothing runs, waits or holds a page in the engine."""
        load = self.state().load
        return (load.running, load.waiting, load.pages_used) == (0, 0, 0)

    def num_aborted(self) -> int:
        """Sequences that the engine was told to drop, out of `finished: length=3 aborted=1`."""
        found = re.search(r"\baborted=(\d+)", self.state().detail)
        return int(found[1]) if found else 0


@contextmanager
def demo(folder: Path) -> Iterator[Demo]:
    """A running server."""
    with serve(folder, "demo", *free_ports(), *SEEDED) as served:
        served.wait_ready()
        found = [
            re.search(pattern, served.out)
            for pattern in (r"HTTP +http://([\d.:]+)/v1", r"gRPC +([\d.:]+)", r"engine +([\d.:]+)")
        ]
        yield Demo(*(match[1] for match in found if match))

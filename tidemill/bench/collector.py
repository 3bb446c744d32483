"""A collector of traces on loopback that counts spans and forgets them, in a process of its own.

It speaks OTLP over gRPC as any collector does. It does not know who sends.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import grpc

_START_S = 60.0


class Collector:
    """`endpoint` is what services are given."""

    def __init__(self, pipe: Connection, port: int) -> None:
        self._pipe = pipe
        self.endpoint = f"http://127.0.0.1:{port}"

    def num_spans(self) -> int:
        """Received until now."""
        self._pipe.send(None)
        return int(self._pipe.recv())


@contextmanager
def collector() -> Iterator[Collector]:
    """Runs until the end of the block. Raises RuntimeError when it does not start."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(_START_S):
            raise RuntimeError("the collector does not start")
        yield Collector(ours, ours.recv())
    finally:
        ours.close()
        process.terminate()
        process.join()


def _serve(pipe: Connection) -> None:
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as rpc

    class Counter(rpc.TraceServiceServicer):
        num_spans = 0

        def Export(self, request: Any, context: Any) -> Any:
            self.num_spans += sum(
                len(scope.spans) for one in request.resource_spans for scope in one.scope_spans
            )
            return pb.ExportTraceServiceResponse()

    counter = Counter()
    server = grpc.server(ThreadPoolExecutor(1))  # one thread: the count has one writer
    rpc.add_TraceServiceServicer_to_server(counter, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    pipe.send(port)
    while True:
        pipe.recv()
        pipe.send(counter.num_spans)

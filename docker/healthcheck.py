"""Exit status 0 while grpc.health.v1 in this container says `readiness` is SERVING.

    healthcheck.py TIDEMILL_HEALTH_PORT TIDEMILL_GRPC_PORT=50051

The port is in the first of these variables that is set, or behind the `=` of one that is not. It
speaks plain text, so a service that has TLS needs its health port.
"""

from __future__ import annotations

import os
import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

TIMEOUT_S = 2.0


def port(words: list[str]) -> int:
    """The port to ask; SystemExit with status 1 when no word names one."""
    for word in words:
        variable, _, default = word.partition("=")
        if found := os.environ.get(variable) or default:
            return int(found)
    raise SystemExit(f"healthcheck: no port in {words}")


def main(words: list[str]) -> int:
    """Asks once; says on standard error what is wrong."""
    with grpc.insecure_channel(f"127.0.0.1:{port(words)}") as channel:
        ask = health_pb2_grpc.HealthStub(channel).Check
        try:
            answer = ask(health_pb2.HealthCheckRequest(service="readiness"), timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            print(f"healthcheck: {error.code().name}: {error.details()}", file=sys.stderr)
            return 1
    if answer.status == health_pb2.HealthCheckResponse.SERVING:
        return 0
    print("healthcheck: not ready", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

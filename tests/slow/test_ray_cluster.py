"""`tidemill engine --executor ray` on a cluster of two nodes: it serves as one rank does, ends when
an actor is lost, and leaves the cluster empty for the next one."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.e2e.test_serve import assert_gone, serve
from tests.service.engine_fixtures import spec
from tests.service.test_ranks_watched import BOUND_S
from tests.slow.test_torchrun import below, ready_stub, tokens
from tests.waiting import PATIENCE_S, eventually, free_port, stopwatch
from tidemill.v1 import engine_pb2 as pb

pytestmark = [pytest.mark.slow, pytest.mark.alone]
pytest.importorskip("ray")

ENGINE = ("demo", "--device=cpu", "--max-rows=4", "--seed=3")
OVER_RAY = ("--executor=ray", "--tensor-parallel-size=2")


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of one whose nodes have room for a rank each."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    try:
        nodes = two_nodes()
    except Exception:  # what Ray raises; it gives a node 30 s, however busy the machine is
        nodes = two_nodes()
    try:
        monkeypatch.setenv("RAY_ADDRESS", nodes.address)
        yield nodes.address
    finally:
        nodes.shutdown()


def two_nodes() -> Any:
    """A cluster of which nothing is left where one of its nodes does not start."""
    from ray.cluster_utils import Cluster

    nodes = Cluster()
    try:
        nodes.add_node(num_cpus=1, include_dashboard=False)
        nodes.add_node(num_cpus=1)
        nodes.wait_for_nodes(PATIENCE_S)
    except Exception:
        nodes.shutdown()
        raise
    return nodes


def actors() -> dict[str, int]:
    """Processes of ranks that Ray has started."""
    lines = {int(one.parent.name): one for one in Path("/proc").glob("[0-9]*/cmdline")}
    found = {}
    for pid, path in lines.items():
        try:
            if path.read_bytes().startswith(b"ray::RankActor"):
                found[f"actor {pid}"] = pid
        except OSError:
            continue  # it ended meanwhile
    return found


@pytest.mark.timeout(900)
def test_an_engine_over_a_cluster_serves_ends_and_serves_again(
    cluster: str, tmp_path: Path
) -> None:
    port = f"--engine-port={(number := free_port())}"
    with serve(tmp_path, *ENGINE, port, verb="engine"):
        alone = tokens(ready_stub(number))
    assert len(alone) == 60

    port = f"--engine-port={(number := free_port())}"
    with serve(tmp_path, *ENGINE, *OVER_RAY, port, verb="engine") as served:
        stub = ready_stub(number)
        assert tokens(stub) == alone
        (actor,) = actors().values()
        followers = {f"rank {pid}": pid for pid in below(actor)}
        assert followers, "control: the rank is not the actor's"
        everybody = served.descendants() | followers
        stream = stub.Generate(pb.GenerateRequest(spec=spec(84, 104, max_tokens=1900)))
        next(stream)
        with stopwatch() as awake_s:
            os.kill(actor, signal.SIGKILL)
            with pytest.raises(grpc.RpcError) as caught:
                list(stream)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            assert served.wait_end() == 1
            assert awake_s() < BOUND_S
        assert "rank 1 on " in served.err
        assert_gone(everybody)

    port = f"--engine-port={(number := free_port())}"
    with serve(tmp_path, *ENGINE, *OVER_RAY, port, verb="engine") as served:
        assert tokens(ready_stub(number)) == alone
        held = actors()
        assert len(held) == 1
        everybody = served.descendants()
        served.process.send_signal(signal.SIGTERM)
        assert served.wait_end() == 0
        assert_gone(everybody | held)
    eventually(lambda: not actors(), "an actor is left")

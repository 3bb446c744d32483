"""`tidemill bench tracing` from end to end: three pairs of services, and a collector for each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tidemill.commands import bench


@pytest.mark.slow
def test_spans_come_as_often_as_they_are_asked_for(tmp_path: Path) -> None:
    """Half of the requests are sampled, so half of the spans arrive; without tracing none could.

    It counts, and waits for half a minute: nothing here is wrong beside others."""
    file = tmp_path / "figures.json"
    flags = ["--rounds=2", "--requests=60", "--rate=60", "--sample-ratio=0.5", f"--json={file}"]
    assert bench.run(["tracing", *flags]) == 0
    found = json.loads(file.read_text())
    always, sampled = (found["spans_per_request"][name] for name in ("always", "sampled"))
    assert always >= 4
    assert always == round(always), "every request has the same spans"
    assert 0.3 * always < sampled < 0.7 * always
    roles = {"frontend 0", "engine server", "rank 0", "both services"}
    assert found["us_per_request"]["off"].keys() == roles
    assert found["us_per_request"]["off"]["both services"] > 100
    for name in ("sampled", "always"):
        for spread in found["added_us_per_request"][name].values():
            assert spread["min"] <= spread["q1"] <= spread["median"] <= spread["max"]
    assert len(found["rounds"]) == 2

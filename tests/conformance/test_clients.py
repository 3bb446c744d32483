"""Real client libraries, each in an environment of its own, on a real server.

`clients/NAME/` has the cases of one of them, run by its own interpreter: `make test-conformance`
builds the environments. The control shows every case an impostor: none may pass.
"""

from __future__ import annotations

import os
import subprocess
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.conformance.demo import Demo
from tests.conformance.impostor import impostor
from tests.waiting import eventually

ROOT = Path(__file__).parents[2]
CLIENTS = Path(__file__).parent / "clients"
NAMES = sorted({path.parent.name for path in CLIENTS.glob("*/cases*")})
LIMIT_S = 240

pytestmark = pytest.mark.conformance


class Outcome(NamedTuple):
    """What became of the cases of one client."""

    passed: list[str]
    failed: list[str]
    skipped: list[str]
    output: str


def run(name: str, url: str, grpc: str, report: Path) -> Outcome:
    """Runs the cases of a client against a server."""
    folder = CLIENTS / name
    cases = sorted(folder.glob("cases*"))
    if cases[0].suffix == ".py":
        python = ROOT / ".clients" / name / "bin" / "python"
        words = [python, "-m", "pytest", "-c", CLIENTS / "pytest.ini", "--rootdir", CLIENTS]
        command = [*words, f"--junitxml={report}", *cases]
    else:
        command = [
            "node",
            "--test",
            "--test-reporter=junit",
            f"--test-reporter-destination={report}",
        ]
        command += cases
    kept = {key: value for key, value in os.environ.items() if key != "PYTEST_ADDOPTS"}
    environ = {**kept, "TIDEMILL_URL": url, "TIDEMILL_GRPC": grpc}
    environ.pop("PYTHONPATH", None)
    done = subprocess.run(
        [str(word) for word in command],
        cwd=folder, env=environ, capture_output=True, text=True, check=False, timeout=LIMIT_S,
    )  # fmt: skip
    output = done.stdout + done.stderr
    assert report.exists(), f"no environment? run `make test-conformance`\n{output}"
    return read(report, output)


def read(report: Path, output: str) -> Outcome:
    """A report in JUnit's form; pytest and Node's runner both write it."""
    outcome = Outcome([], [], [], output)
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        is_failed = case.find("failure") is not None or case.find("error") is not None
        is_skipped = case.find("skipped") is not None
        found = outcome.failed if is_failed else outcome.skipped if is_skipped else outcome.passed
        found.append(case.get("name", ""))
    return outcome


@pytest.mark.parametrize("name", NAMES)
def test_client(name: str, served: Demo, tmp_path: Path) -> None:
    cancelled, aborted = served.num_cancelled(), served.num_aborted()
    outcome = run(name, served.url, served.grpc, tmp_path / "report.xml")
    assert not outcome.failed + outcome.skipped, outcome.output
    assert outcome.passed, outcome.output
    eventually(served.is_idle, f"something is left in the engine: {served.state()}")
    eventually(lambda: served.num_cancelled() > cancelled, "no case leaves a stream")
    eventually(lambda: served.num_aborted() > aborted, "the engine finished what nobody wanted")


@pytest.mark.parametrize("name", NAMES)
def test_no_case_believes_an_impostor(name: str, tmp_path: Path) -> None:
    with impostor() as (url, grpc):
        outcome = run(name, url, grpc, tmp_path / "report.xml")
    assert not outcome.passed + outcome.skipped, outcome.output
    assert outcome.failed, outcome.output

"""Every program in examples/ runs as its README says, apart from the ports.

What needs more than Python and curl is built by `make test-conformance`.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conformance.demo import Demo

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
README = (EXAMPLES / "README.md").read_text()
ANSWERS = {"chat:": "ruobrah", "stream:": "37 38 39 40 41"}
GRPC = {**ANSWERS, "cancel:": "", "error:": "INVALID_ARGUMENT"}
OPENAI = {**ANSWERS, "tool:": "'tom'", "schema:": "'london'", "error:": "400 temperature"}


def commands() -> dict[str, str]:
    """What README says of each example: its command."""
    rows = re.findall(r"^\| \[([\w.]+)\].*\| `(.*?)` \|$", README, re.MULTILINE)
    return dict(rows)


def run(name: str, address: str) -> str:
    """Output of the last command that README gives for an example; those before it build it."""
    command = commands()[name].rpartition(" && ")[2]
    words = [word.replace(".venv/bin/python", sys.executable) for word in command.split()]
    done = subprocess.run(
        [*words, address], cwd=ROOT, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def said(out: str, expected: dict[str, str]) -> None:
    """Every line begins with its word and has what is expected of it."""
    lines = {line.split()[0]: line for line in out.splitlines()}
    assert lines.keys() == expected.keys(), out
    for word, part in expected.items():
        assert part in lines[word], out


def test_readme_names_every_example() -> None:
    tops = {path.name for path in EXAMPLES.iterdir()} - {"README.md", "__pycache__"}
    assert commands().keys() == tops


@pytest.mark.parametrize(
    "name", ["grpc_python.py", pytest.param("grpc_node", marks=pytest.mark.conformance),
             pytest.param("grpc_cpp", marks=pytest.mark.conformance)]
)  # fmt: skip
def test_grpc(name: str, served: Demo) -> None:
    said(run(name, served.grpc), GRPC)


@pytest.mark.parametrize(
    "name", ["openai_python.py", pytest.param("openai_node", marks=pytest.mark.conformance)]
)
def test_openai(name: str, served: Demo) -> None:
    said(run(name, f"{served.url}/v1"), OPENAI)


def test_curl(served: Demo) -> None:
    out = run("curl_sse.sh", f"{served.url}/v1")
    assert "".join(re.findall(r'"content":"(.*?)"', out)) == "37 38 39 40 41"
    assert '"completion_tokens":15' in out
    assert out.endswith("data: [DONE]\n\n")


def test_an_example_that_fails_is_seen(served: Demo) -> None:
    """The gRPC face is no HTTP server, and the other way round."""
    for name, address in (
        ("curl_sse.sh", f"http://{served.grpc}/v1"),
        ("grpc_python.py", served.http),
    ):
        with pytest.raises(AssertionError):
            run(name, address)

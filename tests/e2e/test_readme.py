"""Every command and program of README.md runs as printed, apart from the ports.

Only the first block (the two `make` verbs) is left out: CI runs those themselves.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.test_serve import ROOT, SEEDED, free_ports, serve

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
PYTHON = [text for language, text in BLOCKS if language == "python"]
SHELL = [text for language, text in BLOCKS if not language and re.match(r"\.venv|curl", text)]


@pytest.fixture(scope="module")
def addresses(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, dict[str, str]]]:
    """README's addresses to real ones, per model."""
    folders = [tmp_path_factory.mktemp(name) for name in ("demo", "block")]
    with (
        serve(folders[0], "demo", *free_ports(), *SEEDED) as demo,
        serve(folders[1], "demo-block", *free_ports(), *SEEDED) as block,
    ):
        found = {}
        for name, served in (("demo", demo), ("demo-block", block)):
            served.wait_ready()
            http = re.search(r"http://([\d.:]+)/v1", served.out)
            grpc = re.search(r"gRPC +(\S+)", served.out)
            assert http is not None
            assert grpc is not None
            found[name] = {"127.0.0.1:8000": http[1], "127.0.0.1:50051": grpc[1]}
        yield found


def run(command: list[str], text: str, addresses: dict[str, str]) -> str:
    for printed, real in addresses.items():
        text = text.replace(printed, real)
    done = subprocess.run([*command, text], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_blocks_are_found() -> None:
    assert len(PYTHON) == 3
    assert len(SHELL) == 5


@pytest.mark.parametrize(
    ("number", "answer"),
    [(0, "ruobrah"), (1, '{"name": "tom", "age": 31, "city": "rome"}'), (2, "579 stop")],
)
def test_programs(number: int, answer: str, addresses: dict[str, dict[str, str]]) -> None:
    assert answer in run([sys.executable, "-c"], PYTHON[number], addresses["demo"])


@pytest.mark.parametrize(
    ("number", "model", "answer"),
    [
        (0, "demo", "ruobrah"),
        (1, "demo", "37 38 39 40 41"),
        (2, "demo-block", "tide tide tide"),
        (3, "demo", r"{\"name\": \"tom\", \"age\": 31"),
        (4, "demo-block", " 37 38 39 40"),
    ],
)
def test_commands(
    number: int, model: str, answer: str, addresses: dict[str, dict[str, str]]
) -> None:
    bin_folder = Path(sys.executable).parent
    text = SHELL[number].replace(".venv/bin/", f"{bin_folder}/")
    if "tidemill chat" in text:
        port = addresses[model]["127.0.0.1:50051"]
        text = text.rstrip() + f" --server {port}"
    out = run(["bash", "-c"], text, addresses[model])
    streamed = "".join(re.findall(r'"text": ?"(.*?)"', out))
    assert answer in (streamed or out)


def test_generate_offline() -> None:
    printed = re.search(r"`tidemill (generate demo .*)`", README)
    assert printed is not None
    command = f"{sys.executable} -m tidemill {printed[1]} {' '.join(SEEDED)}"
    done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "abcd" in done.stdout

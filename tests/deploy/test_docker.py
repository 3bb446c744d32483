"""The container files: what a linter and the daemon's rules can say without building them."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy import healthcheck

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
HADOLINT = Path(sys.executable).parent / "hadolint"

every_file = pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)


def lint(file: Path) -> str:
    """What the linter says; nothing is good."""
    done = subprocess.run([HADOLINT, file], capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def test_there_are_two() -> None:
    assert [file.stem for file in FILES] == ["engine", "frontend"]


@every_file
def test_the_linter_is_content(file: Path) -> None:
    assert lint(file) == ""


def test_the_linter_sees_a_breach(tmp_path: Path) -> None:
    broken = tmp_path / "frontend.Dockerfile"
    text = (ROOT / "docker" / "frontend.Dockerfile").read_text()
    broken.write_text(
        text.replace("WORKDIR /src", "WORKDIR src").replace("COPY proto", "ADD proto")
    )
    assert {"DL3000", "DL3020"} <= set(re.findall(r"DL\d+", lint(broken)))


@every_file
def test_the_last_stage_runs_as_a_number(file: Path) -> None:
    last = file.read_text().rpartition("\nFROM ")[2]
    assert re.findall(r"^USER (.*)$", last, re.MULTILINE) == ["65532:65532"]
    assert "HEALTHCHECK" in last


@every_file
def test_what_is_copied_is_in_the_context(file: Path) -> None:
    """.dockerignore leaves everything out but what it names."""
    ignore = (ROOT / ".dockerignore").read_text().splitlines()
    allowed = {line[1:] for line in ignore if line.startswith("!")}
    copied = re.findall(r"^COPY (?!--from)(.*) \S+$", file.read_text(), re.MULTILINE)
    words = {word for line in copied for word in line.split()}
    assert {"tidemill", "frontend", "engine_service", "docker/healthcheck.py"} <= words
    for word in words:
        assert word in allowed or word.partition("/")[0] in allowed, f"{word} is ignored"
        assert (ROOT / word).exists(), word


@pytest.mark.parametrize(
    ("serving", "status"), [(True, 0), (False, 1), (None, 1)], ids=["ready", "loading", "nobody"]
)
async def test_healthcheck(serving: bool | None, status: int) -> None:
    assert await healthcheck.status_of(serving) == status


async def test_healthcheck_without_a_port() -> None:
    assert await healthcheck.run("TIDEMILL_HEALTH_PORT") == 1

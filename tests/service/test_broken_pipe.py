"""Whoever reads what a command prints may leave before its end: no traceback follows."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.service.frontends import stack
from tests.waiting import PATIENCE_S
from tidemill.commands.pipes import LEFT, while_read

ROOT = Path(__file__).parents[2]


@contextmanager
def unread() -> Iterator[int]:
    """The end of a pipe whose reader has left."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        yield writer
    finally:
        os.close(writer)


def environ(buffered: bool) -> dict[str, str]:
    found = {**os.environ, "PYTHONPATH": str(ROOT), "GRPC_VERBOSITY": "NONE"}
    found.pop("PYTHONUNBUFFERED", None)
    return found if buffered else {**found, "PYTHONUNBUFFERED": "1"}


@pytest.mark.parametrize("buffered", [True, False])
@pytest.mark.parametrize(
    "argv",
    [["--help"], ["--version"], ["bench"], ["serve", "--help"], ["bench", "latency", "--help"]],
    ids=" ".join,
)
def test_nobody_reads_from_the_beginning(argv: list[str], buffered: bool) -> None:
    with unread() as writer:
        done = subprocess.run(
            [sys.executable, "-m", "tidemill", *argv],
            stdout=writer, stderr=subprocess.PIPE, env=environ(buffered), text=True,
            timeout=PATIENCE_S, check=False,
        )  # fmt: skip
    assert (done.returncode in (0, LEFT), done.stderr) == (True, "")


@pytest.mark.parametrize("closed", ["1", "2", "1 2"])
def test_outputs_that_were_never_open(closed: str) -> None:
    """As some supervisors start a program."""
    shut = " ".join(f"{one}>&-" for one in closed.split())
    done = subprocess.run(
        ["sh", "-c", f'"{sys.executable}" -m tidemill --version {shut}'],
        capture_output=True, env=environ(True), text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


def test_a_chat_without_an_input_is_one_that_has_ended() -> None:
    done = subprocess.run(
        ["sh", "-c", f'"{sys.executable}" -m tidemill chat 0<&-'],
        capture_output=True, env=environ(True), text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has it")
@pytest.mark.parametrize("buffered", [True, False])
@pytest.mark.parametrize("argv", ["--version", "collect-env --json"])
def test_no_room_for_what_is_printed(argv: str, buffered: bool) -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "tidemill", *argv.split()],
            stdout=full, stderr=subprocess.PIPE, env=environ(buffered), text=True,
            timeout=PATIENCE_S, check=False,
        )  # fmt: skip
    said = "tidemill: cannot write: No space left on device\n"
    assert (done.returncode, done.stderr) == (1, said)


def test_both_outputs_into_one_pipe() -> None:
    with unread() as writer:
        words = [sys.executable, "-m", "tidemill", "serve", "no-such-model"]
        done = subprocess.run(
            words, stdout=writer, stderr=writer, env=environ(True), timeout=PATIENCE_S, check=False
        )
    assert done.returncode == LEFT


@pytest.mark.parametrize("buffered", [True, False])
@pytest.mark.parametrize("is_kept", [True, False], ids=["kept", "shown"])
def test_figures_that_are_kept_need_no_reader(
    tmp_path: Path, is_kept: bool, buffered: bool
) -> None:
    """`tidemill bench ... --json FILE 2>&1 | head`; without a FILE nobody wants what is measured,
    and it ends with its first line."""
    file = tmp_path / "figures.json"
    argv = ["bench", "throughput", "--model=demo", "--executor=simulated", "--simulated-step-ms=0"]
    argv += ["--against=none", "--requests=1", "--input-len=4", "--output-len=4", "--repeats=1"]
    with unread() as writer:
        done = subprocess.run(
            [sys.executable, "-m", "tidemill", *argv, *([f"--json={file}"] if is_kept else [])],
            stdout=writer, stderr=writer, env=environ(buffered), timeout=PATIENCE_S, check=False,
        )  # fmt: skip
    assert done.returncode == LEFT
    assert file.exists() == is_kept
    if is_kept:
        assert json.loads(file.read_text())["benchmark"] == "throughput"


@pytest.mark.parametrize("buffered", [True, False])
async def test_a_reader_that_leaves_a_chat(tmp_path: Path, buffered: bool) -> None:
    """It has read the beginning of an answer that then goes on."""
    reader, writer = os.pipe()
    async with stack(tmp_path, engine={"hold_after": 3}) as served:
        words = ["chat", "ab" * 50, "--server", served.grpc_address, "--max-tokens=100"]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tidemill", *words),
            stdout=writer,
            stderr=asyncio.subprocess.PIPE,
            env=environ(buffered),
        )
        os.close(writer)
        async with asyncio.timeout(PATIENCE_S):
            assert await asyncio.to_thread(os.read, reader, 1) == b"a"
            os.close(reader)
            served.engine.hold_after = None
            _, err = await process.communicate()
    assert (process.returncode, err) == (LEFT, b"")


def test_a_connection_that_broke_is_another_thing() -> None:
    def breaks() -> int:
        raise BrokenPipeError(32, "of a socket")

    with pytest.raises(BrokenPipeError, match="of a socket"):
        while_read(breaks)

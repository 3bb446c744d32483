"""The command line: instant help without torch, helpful refusals, spellings, ports, children."""

import asyncio
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.waiting import PATIENCE_S, eventually, free_port
from tidemill import cli
from tidemill.commands import bench, child, ports
from tidemill.runtime.endings import ending
from tidemill.runtime.errors import FailedPrecondition

ROOT = Path(__file__).parents[2]
WITHOUT_TORCH = """
import sys
from tidemill.cli import main
try:
    sys.exit(main(sys.argv[1:]))
finally:
    assert "torch" not in sys.modules, "torch was imported"
"""

TOLD_EARLY = """
import os, signal, sys
from tidemill import cli
cli.import_module = lambda name: os.kill(os.getpid(), signal.SIGTERM)
sys.exit(cli.main(["engine", "demo"]))
"""

SLEEP = "import sys, time\nprint('hi', file=sys.stderr, flush=True)\ntime.sleep(600)\n"


async def started(module: str, folder: Path) -> tuple[child.Child, list[str]]:
    """A child that has written its first line, and its lines."""
    lines: list[str] = []
    spoken = asyncio.Event()

    def hear(line: str) -> None:
        lines.append(line)
        spoken.set()

    environ = {**os.environ, "PYTHONPATH": str(folder)}
    running = await child.Child.start(module, [], environ=environ, on_line=hear)
    await spoken.wait()
    return running, lines


def tidemill(*argv: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT_TORCH, *argv]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def cpu_s(run: Callable[[], object]) -> float:
    """CPU time of the quickest of three runs, in which a busy machine shows least."""
    seconds = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        run()
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(seconds)


def wall_s(argv: list[str]) -> float:
    """How long a user waits."""
    began = time.monotonic()
    tidemill(*argv)
    return time.monotonic() - began


def test_help_and_version_are_instant() -> None:
    """Under a second, and little more work than the interpreter itself.

    Both are measured next to each other, and again on a machine that was busy meanwhile: the same
    work costs more there, and it may have been so for one of the two only.
    """

    def bare() -> object:
        return subprocess.run([sys.executable, "-c", "pass"], check=True)

    for argv in (["--help"], ["--version"], []):
        done = tidemill(*argv)
        assert done.returncode == 0, done.stderr
        assert "tidemill" in done.stdout
        verb = partial(tidemill, *argv)
        assert any(cpu_s(verb) < 3 * cpu_s(bare) for _ in range(5)), argv
        assert any(wall_s(argv) < 1.0 for _ in range(20)), argv
    grpc = [sys.executable, "-c", "import grpc, google.protobuf.message"]
    heavy = partial(subprocess.run, grpc, check=True)
    assert any(cpu_s(heavy) > 3 * cpu_s(bare) for _ in range(5)), "the bar is no bar"


@pytest.mark.parametrize("verb", ["serve", "engine", "frontend", "generate", "chat", "collect-env"])
def test_help_of_a_verb_needs_no_torch(verb: str) -> None:
    done = tidemill(verb, "--help")
    assert done.returncode == 0, done.stderr
    assert f"usage: tidemill {verb}" in done.stdout


def test_serve_takes_the_flags_of_both_services() -> None:
    text = tidemill("serve", "--help").stdout
    for flag in ("--http-port", "--grpc-port", "--engine-port", "--host", "--page-size"):
        assert text.count(f"  {flag} ") == 1, flag
    assert "--connect-timeout-s" not in text


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["sevre"], "unknown command 'sevre'; did you mean serve?"),
        (["serve", "--http-prot", "1"], "did you mean --http-port"),
        (["serve", "--page-size", "x"], "'x' is not INT"),
        (["generate"], "missing --prompt"),
    ],
)
def test_refusals(argv: list[str], words: str) -> None:
    done = tidemill(*argv)
    assert done.returncode == 2
    assert words in done.stderr


def test_serve_starts_no_engine_that_would_answer_nobody() -> None:
    done = tidemill("serve", "demo", "--role", "prefill", "--print-config")
    assert (done.returncode, done.stdout) == (1, "")
    assert "start it with tidemill engine" in done.stderr
    assert tidemill("serve", "demo", "--role", "decode", "--print-config").returncode == 0


def test_bench_lists_what_exists(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.run([]) == 0
    text = capsys.readouterr().out
    for name in bench.BENCHMARKS:
        assert (ROOT / "tidemill" / "bench" / f"{name}.py").exists()
        assert name in text
    assert bench.run(["latnecy"]) == 2
    told = capsys.readouterr()
    assert told.out == "", "a script reads figures there"
    assert told.err.startswith(
        "tidemill bench: unknown benchmark 'latnecy'; did you mean latency?\n"
    )
    assert text in told.err


@pytest.mark.parametrize(
    ("place", "words"),
    [(".", "is a folder: name a file"), ("missing/x.json", "missing is no folder: make it first")],
)
def test_figures_that_have_no_place_are_not_measured(
    place: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tidemill.bench import kernels  # torch

    monkeypatch.setattr(kernels, "run", lambda _: pytest.fail("measured"))
    with pytest.raises(FailedPrecondition, match=words):
        bench.run(["kernels", f"--json={tmp_path / place}"])


def test_every_verb_has_its_file() -> None:
    files = {path.stem for path in (ROOT / "tidemill" / "commands").glob("*.py")}
    assert {verb.replace("-", "_") for verb in cli.VERBS} <= files


def test_missing_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "grpc", None)
    for name in ("serve", "supervisor", "keeper", "screen", "engine_state"):
        monkeypatch.delitem(sys.modules, f"tidemill.commands.{name}", raising=False)
    assert cli.main(["serve"]) == 1
    assert "pip install 'tidemill[all]'" in capsys.readouterr().err


def wishes(*asked: tuple[str, int]) -> list[ports.Wish]:
    return [ports.Wish("127.0.0.1", flag, port) for flag, port in asked]


def test_busy_port_is_named_with_its_flag() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(
            FailedPrecondition, match=f"{port}: the port is in use.* with --http-port"
        ):
            ports.settle(wishes(("--grpc-port", 0), ("--http-port", port)))


def test_two_flags_cannot_share_a_port() -> None:
    free = free_port()
    with pytest.raises(FailedPrecondition, match=r"it is --grpc-port's or .* with --http-port"):
        ports.settle(wishes(("--grpc-port", free), ("--http-port", free)))


def test_free_ports_differ() -> None:
    found = ports.settle(wishes(("--grpc-port", 0), ("--http-port", 0), ("--engine-port", 0)))
    assert len(set(found)) == 3
    assert 0 not in found


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid"])
def test_foreign_host_is_refused(host: str) -> None:
    with pytest.raises(FailedPrecondition, match=f"cannot listen on {host}"):
        ports.settle([ports.Wish(host, "--http-port", 0)])


async def test_child_is_heard_and_stopped(tmp_path: Path) -> None:
    (tmp_path / "sleeper.py").write_text(SLEEP)
    running, lines = await started("sleeper", tmp_path)
    await running.stop(PATIENCE_S)
    assert lines == ["hi"]
    assert ending(await running.wait()) == "was killed by SIGTERM"


async def test_child_that_does_not_listen_is_killed(tmp_path: Path) -> None:
    (tmp_path / "deaf.py").write_text("import signal\nsignal.signal(15, signal.SIG_IGN)\n" + SLEEP)
    running, _ = await started("deaf", tmp_path)
    await running.stop(0.1)
    assert ending(await running.wait()) == "was killed by SIGKILL"


def test_child_does_not_outlive_us(tmp_path: Path) -> None:
    """A supervisor that is killed takes its children with it."""
    (tmp_path / "sleeper.py").write_text(SLEEP)
    (tmp_path / "supervisor.py").write_text(
        "import asyncio, os\n"
        "from tidemill.commands.child import Child\n"
        "async def main():\n"
        "    child = await Child.start('sleeper', [], environ=os.environ, on_line=print)\n"
        "    print(child.pid, flush=True)\n"
        "    await child.wait()\n"
        "asyncio.run(main())\n"
    )
    environ = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    command = [sys.executable, "-m", "supervisor"]
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None
        pid = int(supervisor.stdout.readline())
        supervisor.send_signal(signal.SIGKILL)
    eventually(lambda: not _is_alive(pid), "the child still runs")


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_service_that_still_imports_can_be_told_to_stop() -> None:
    """By a handler of its own: the kernel would keep the signal from the first process of a
    container, which its supervisor then waits for in vain."""
    told = [sys.executable, "-c", TOLD_EARLY]
    assert subprocess.run(told, cwd=ROOT, check=False).returncode == 128 + signal.SIGTERM

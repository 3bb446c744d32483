"""`tidemill serve` as a user runs it: Ready block, an answer, and every way to end."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.real_stack import START_S, is_gone
from tests.waiting import free_port
from tidemill.client import Client
from tidemill.sampling_params import SamplingParams

ROOT = Path(__file__).parents[2]
ANY_PORTS = ("--http-port=0", "--grpc-port=0", "--engine-port=0")
SEEDED = ("--seed=1",)
"""For who compares answers at the default temperature: once in a few thousand times one draws
another token than the likeliest."""


class Served:
    """A running `tidemill serve`, its output in files."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path) -> None:
        self.process = process
        self._folder = folder

    @property
    def out(self) -> str:
        return (self._folder / "out").read_text()

    @property
    def err(self) -> str:
        return (self._folder / "err").read_text()

    def wait_ready(self) -> None:
        deadline = time.monotonic() + START_S
        while "curl" not in self.out:
            assert self.process.poll() is None, self.err
            assert time.monotonic() < deadline, self.err
            time.sleep(0.05)

    def wait_end(self) -> int:
        return self.process.wait(START_S)

    def children(self) -> dict[str, int]:
        """Module name to pid of every service, ranks included."""
        return {name: pid for name, pid in self.descendants().items() if "multipro" not in name}

    def descendants(self) -> dict[str, int]:
        """The same of everything that was started, also in which templates are rendered."""
        found, parents = dict[str, int](), [self.process.pid]
        while parents:
            parent = parents.pop()
            for text in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
                words = Path(f"/proc/{text}/cmdline").read_bytes().decode().split("\0")
                name = f"{' '.join(words)} {text}"
                if "-m" in words:
                    name = words[words.index("-m") + 1]
                found[name] = int(text)
                parents.append(int(text))
        return found


def free_ports(num_engines: int = 1) -> tuple[str, ...]:
    """Flags. Of `ANY_PORTS` the command chooses the ports when it starts, and services bind them
    seconds later: on a machine that runs other tests too, some of those could be faster."""
    engine = free_port(neighbours=num_engines)
    return f"--http-port={free_port()}", f"--grpc-port={free_port()}", f"--engine-port={engine}"


@contextmanager
def serve(folder: Path, *argv: str, verb: str = "serve") -> Iterator[Served]:
    command = [sys.executable, "-m", "tidemill", verb, *argv]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
        process = subprocess.Popen(command, env=environ, stdout=out, stderr=err)
        try:
            yield Served(process, folder)
        finally:
            process.kill()
            process.wait()


def assert_gone(pids: dict[str, int]) -> None:
    deadline = time.monotonic() + START_S
    while running := [name for name, pid in pids.items() if not is_gone(pid)]:
        assert time.monotonic() < deadline, f"{running} still run"
        time.sleep(0.05)


def test_ready_answers_and_leaves_when_asked(tmp_path: Path) -> None:
    with serve(tmp_path, "demo", *ANY_PORTS) as served:
        served.wait_ready()
        assert served.out.count("Tidemill is ready") == 1
        url = re.search(r"curl (\S+)", served.out)
        address = re.search(r"gRPC +(\S+)", served.out)
        asked = re.search(r"-d '(.*)'", served.out)
        assert url is not None
        assert address is not None
        assert asked is not None
        assert "demo: Qwen3ForCausalLM" in served.out
        assert re.search(r"KV +[\d,]+ tokens", served.out)

        body = {**json.loads(asked[1]), "stream": False, "temperature": 0}
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(url[1], json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request) as answer:
            over_http = json.load(answer)["choices"][0]["message"]["content"]
        with Client(address[1]) as client:
            over_grpc = client.chat(body["messages"], SamplingParams(temperature=0.0)).text
        assert over_http == over_grpc != ""

        assert served.children().keys() == {"engine_service", "engine_service.rank", "frontend"}
        children = served.descendants()
        assert sum("forkserver" in name for name in children) == 2, "a template's process"
        served.process.send_signal(signal.SIGTERM)
        assert served.wait_end() == 0, served.err
        assert_gone(children)


@pytest.mark.parametrize(
    ("victim", "words"),
    [
        ("engine_service", "engine_service was killed by SIGKILL"),
        ("engine_service.rank", "engine_service ended with status 1: .*SIGKILL"),
        ("frontend", "frontend was killed by SIGKILL"),
    ],
)
def test_says_which_service_died_and_ends_the_rest(tmp_path: Path, victim: str, words: str) -> None:
    with serve(tmp_path, "demo", "--executor=simulated", *free_ports()) as served:
        served.wait_ready()
        children = served.descendants()
        os.kill(children[victim], signal.SIGKILL)
        assert served.wait_end() == 1
        assert re.search(f"tidemill serve: {words}", served.err), served.err
        assert_gone(children)


def test_nothing_outlives_a_killed_supervisor(tmp_path: Path) -> None:
    with serve(tmp_path, "demo", "--executor=simulated", *free_ports()) as served:
        served.wait_ready()
        children = served.descendants()
        served.process.kill()
        assert_gone(children)


def test_a_model_that_cannot_load_says_why(tmp_path: Path) -> None:
    folder = tmp_path / "no-weights"
    folder.mkdir()
    shutil.copy(ROOT / "tidemill" / "builtin" / "demo" / "config.json", folder)
    with serve(tmp_path, str(folder), *free_ports()) as served:
        assert served.wait_end() == 1
        said = r"tidemill serve: engine_service ended .*no-weights has no \*\.safetensors"
        assert re.search(said, served.err), served.err
        assert served.err.count("no-weights has no") == 1, "it is said twice"
        assert served.out == ""


def test_a_busy_port_is_named_with_its_flag(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        flags = [*free_ports(), f"--grpc-port={port}"]
        with serve(tmp_path, "demo", *flags) as served:
            assert served.wait_end() == 1
            assert f"{port}: the port is in use" in served.err
            assert "--grpc-port" in served.err

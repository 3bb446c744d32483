"""The frontend image is really built, and answers from a container that may write to /tmp alone."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.real_stack import START_S
from tests.slow.frontend_image import ROOT, Built, missing
from tests.waiting import eventually, free_port

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing())]
LARGEST_BYTES = 450 << 20  # of what we put on top of the base
CHECK = ("python3", "/app/healthcheck.py", "TIDEMILL_GRPC_PORT")


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Built]:
    folder = tmp_path_factory.mktemp("image")
    built = Built(folder)
    yield built
    built.buildah("umount", "--all")
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real engine of the sources, on loopback."""
    port = free_port()
    words = (sys.executable, "-m", "engine_service", "--model=demo", f"--engine-port={port}")
    with (tmp_path_factory.mktemp("engine") / "log").open("w") as log:
        process = subprocess.Popen(words, cwd=ROOT, stdout=log, stderr=log)
        yield f"127.0.0.1:{port}"
        process.terminate()
        assert process.wait(60) == 0


def test_what_it_is(image: Built) -> None:
    settings = image.settings
    assert settings["User"] == "65532:65532"
    assert settings["Entrypoint"] == ["tidemill", "frontend"]
    assert settings["Healthcheck"]["Test"][:3] == ["CMD", "python3", "/app/healthcheck.py"]
    assert set(settings["ExposedPorts"]) == {"8000/tcp", "50051/tcp"}
    assert settings["Labels"]["org.opencontainers.image.licenses"] == "Apache-2.0"


def test_what_is_inside(image: Built) -> None:
    """No torch, nothing that installs, nothing of the machine that built it; and it is small."""
    packages = {path.name for path in (image.files / "venv").glob("lib/python*/site-packages/*")}
    assert {"tidemill", "frontend", "transformers", "kubernetes_asyncio"} <= packages
    assert not packages & {"torch", "triton", "pip", "setuptools", "pytest"}
    size = sum(p.lstat().st_size for p in (image.files / "venv").rglob("*") if p.is_file())
    print(f"{size / (1 << 20):.0f} MiB on top of the base")
    assert size < LARGEST_BYTES
    assert not (image.files / "src").exists()
    assert not (image.files / "etc" / "pip.conf").exists()
    words = json.dumps(image.config)
    assert not [word for word in ("pip.conf", "PASSWORD", "TOKEN", "SECRET") if word in words]


def test_its_root_is_read_only(image: Built) -> None:
    status, out = image.run("touch", "/app/file", "/venv/file", "/file")
    assert status == 1
    assert out.count("Read-only file system") == 3
    assert image.run("touch", "/tmp/file") == (0, "")


def test_it_serves(image: Built, engine: str) -> None:
    http, grpc = free_port(), free_port()
    flags = (f"--engine={engine}", f"--http-port={http}", f"--grpc-port={grpc}")
    check = {"TIDEMILL_GRPC_PORT": str(grpc)}
    assert image.run(*CHECK, **check)[0] == 1
    with image.container(*image.settings["Entrypoint"], *flags) as process:

        def is_healthy() -> bool:
            assert process.poll() is None, process.communicate()
            return image.run(*CHECK, **check)[0] == 0

        eventually(is_healthy, "the frontend in the image is not ready", START_S)
        status = Path(f"/proc/{process.pid}/status").read_text()
        assert "Uid:\t65532\t65532\t65532\t65532" in status
        asked = {"messages": [{"role": "user", "content": "reverse: harbour"}], "temperature": 0}
        request = urllib.request.Request(
            f"http://127.0.0.1:{http}/v1/chat/completions",
            json.dumps(asked).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            answer = json.load(response)
        assert answer["choices"][0]["message"]["content"] == "ruobrah"
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=60)
        assert process.returncode == 0, out

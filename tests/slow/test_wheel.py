"""The wheel as users install it: complete, and usable by a frontend that has no torch."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import tidemill

ROOT = Path(__file__).parents[2]
MODEL_FILES = {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}
WITHOUT_TORCH = """
import importlib.util, sys
import frontend.app, frontend.config, tidemill.client
assert importlib.util.find_spec("torch") is None, "torch is installed"
assert frontend.__path__[0].startswith(sys.prefix), frontend.__path__
"""

pytestmark = pytest.mark.slow


def run(*command: object, folder: Path, **environ: str) -> str:
    """Standard output of a command that must succeed, away from the sources."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=folder,
        env=kept | environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of the tracked folders, so that the sources stay as they are."""
    source, folder = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("tidemill", "frontend", "engine_service", "proto"):
        run("cp", "-r", ROOT / name, source, folder=source)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        run("cp", ROOT / name, source, folder=source)
    flags = ("--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", folder)
    run(sys.executable, "-m", "pip", "wheel", *flags, source, folder=source)
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_is_complete(wheel: Path) -> None:
    assert wheel.name == f"tidemill-{tidemill.__version__}-py3-none-any.whl"
    names = set(zipfile.ZipFile(wheel).namelist())
    for model in ("demo", "demo-block", "demo-canvas"):
        assert {f"tidemill/builtin/{model}/{name}" for name in MODEL_FILES} <= names
    for package in ("tidemill", "frontend", "engine_service"):
        files = {str(path.relative_to(ROOT)) for path in (ROOT / package).rglob("*.py")}
        assert files <= names, f"missing: {sorted(files - names)}"
    page = {str(path.relative_to(ROOT)) for path in (ROOT / "frontend" / "web").iterdir()}
    assert "frontend/web/index.html" in page <= names
    assert {"tidemill/v1/engine_pb2.pyi", "tidemill/py.typed"} <= names
    assert "tidemill/oip/open_inference_pb2.pyi" in names
    for proto in ("engine.proto", "text.proto"):
        assert any(name.endswith(f"proto/tidemill/v1/{proto}") for name in names)
    assert not [name for name in names if name.startswith("tests/") or "__pycache__" in name]
    assert wheel.stat().st_size < 12 << 20


def test_a_frontend_needs_no_torch(wheel: Path, tmp_path: Path) -> None:
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv", folder=tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    requirements = ROOT / "requirements"
    install = (sys.executable, requirements / "install.py", python, requirements / "frontend.lock")
    run(*install, folder=tmp_path)
    pip = (sys.executable, "-m", "pip", "--python", python)
    wheels = ("--quiet", "--no-compile", "--no-deps", "--no-index", wheel)
    run(*pip, "install", *wheels, folder=tmp_path)
    run(*pip, "check", folder=tmp_path)
    run(python, "-c", WITHOUT_TORCH, folder=tmp_path)
    command = tmp_path / "venv" / "bin" / "tidemill"
    assert tidemill.__version__ in run(command, "--version", folder=tmp_path)
    assert "--http-port" in run(command, "frontend", "--help", folder=tmp_path)


def test_the_wheel_generates(wheel: Path, tmp_path: Path) -> None:
    """With the environment of this test, but none of its sources."""
    folder = tmp_path / "unpacked"
    zipfile.ZipFile(wheel).extractall(folder)
    where = "import tidemill, engine_service; print(tidemill.__file__, engine_service.__file__)"
    found = run(sys.executable, "-c", where, folder=tmp_path, PYTHONPATH=str(folder)).split()
    assert all(Path(path).is_relative_to(folder) for path in found), found
    words = ("-m", "tidemill", "generate", "demo", "--prompt=add: 12+34 =", "--temperature=0")
    assert run(sys.executable, *words, folder=tmp_path, PYTHONPATH=str(folder)).strip() == "46"

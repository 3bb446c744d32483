"""Imports fall downwards, and no torch is reachable from rooms that do without it.

The contracts stand in pyproject.toml; the negative controls add one forbidden import to a copy.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("tidemill", "frontend", "engine_service")
NO_TORCH = (
    "tidemill",
    "tidemill.commands",
    "tidemill.runtime",
    "tidemill.v1",
    "frontend",
    "frontend.api",
    "engine_service.server",
    "engine_service.core",
)
NEEDS_TORCH = ("tidemill.llm", "tidemill.__main__", "frontend.__main__")

# Imports every module of the packages named, with torch made impossible to import.
PROBE = """
import importlib, pkgutil, sys
sys.modules["torch"] = None
for package in sys.argv[2].split(","):
    found = importlib.import_module(package)
    for module in pkgutil.iter_modules(found.__path__, package + "."):
        if not module.ispkg and module.name not in sys.argv[1].split(","):
            importlib.import_module(module.name)
"""


def lint(root: Path) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache", "--no-logo"]
    env = {**os.environ, "PYTHONPATH": str(root)}
    return subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, check=False)


def probe(root: Path, *packages: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROBE, ",".join(NEEDS_TORCH), ",".join(packages)]
    env = {**os.environ, "PYTHONPATH": str(root)}
    return subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, check=False)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for package in PACKAGES:
        skip = shutil.ignore_patterns("__pycache__", "*.safetensors", "*.json")
        shutil.copytree(ROOT / package, tmp_path / package, ignore=skip)
    return tmp_path


def test_contracts_hold() -> None:
    done = lint(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("frontend/config.py", "import engine_service.config"),
        ("engine_service/config.py", "import tidemill.cli"),
        ("tidemill/runtime/log.py", "import frontend.config"),
        ("tidemill/runtime/log.py", "import tidemill.v1.engine_pb2, tidemill.client"),
        ("engine_service/core/pages.py", "import torch"),
        ("engine_service/core/pages.py", "import tidemill.runtime.log"),
        ("engine_service/server/state.py", "import engine_service.core.scheduler"),
        ("engine_service/server/state.py", "import engine_service.sampling.rng"),
        ("engine_service/sampling/rng.py", "import engine_service.models.base"),
        ("engine_service/worker/weights.py", "import engine_service.core.scheduler"),
        ("engine_service/kernels/__init__.py", "import engine_service.core.step"),
    ],
)
def test_contracts_see_a_breach(copy: Path, path: str, line: str) -> None:
    with (copy / path).open("a") as file:
        file.write(f"\n{line}\n")
    done = lint(copy)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "BROKEN" in done.stdout


def test_no_torch_where_none_is_needed() -> None:
    done = probe(ROOT, *NO_TORCH)
    assert done.returncode == 0, done.stderr


def test_probe_sees_torch(copy: Path) -> None:
    (copy / "frontend" / "config.py").write_text("import torch\n")
    done = probe(copy, "frontend")
    assert "torch" in done.stderr.splitlines()[-1]

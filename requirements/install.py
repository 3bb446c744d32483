"""Fills an environment with what a lock file names: `python install.py PYTHON FILE`.

pip goes through the index page of every package, which takes it minutes; uv takes seconds. uv hears
nothing of what pip is told here (PIP_*, pip.conf), so where packages come from is passed on to it.
Whatever it cannot do, pip does.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

LOCK = Path(__file__).with_name("cpu.lock")
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
VARIABLES = {
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "constraint": ("UV_CONSTRAINT", " "),
    "trusted-host": ("UV_INSECURE_HOST", " "),
    "cert": ("SSL_CERT_FILE", " "),
    "proxy": ("ALL_PROXY", " "),
}
"""By pip's name, what uv reads, and what stands between several."""


def install(python: str, file: str) -> int:
    """Into the environment of `python`; returns the exit status."""
    environ = {**os.environ, "UV_INDEX_STRATEGY": "unsafe-best-match"}  # the newest, as pip does
    told = told_to_pip()
    for name, values in told.items():
        if name in VARIABLES:
            variable, between = VARIABLES[name]
            environ[variable] = between.join(values)
    if "no-index" not in told and has_uv():
        uv = (Path(sys.executable).with_name("uv"), "pip", "install", "--quiet", "--python", python)
        if subprocess.run((*uv, "-r", file), env=environ, check=False).returncode == 0:
            return 0
        print(f"uv could not install {file}: pip does, in minutes", file=sys.stderr)
    pip = (*PIP, "--python", python, "install", "--quiet", "--no-compile", "-r", file)
    return subprocess.run(pip, check=False).returncode


def told_to_pip() -> dict[str, list[str]]:
    """By name, from its files and the environment, which goes first."""
    listed = subprocess.run((*PIP, "config", "list"), capture_output=True, text=True, check=True)
    found: dict[str, list[str]] = {}
    for line in sorted(listed.stdout.splitlines(), key=lambda line: not line.startswith(":env:")):
        name, _, value = line.partition("=")
        found.setdefault(name.rpartition(".")[2], str(ast.literal_eval(value)).split())
    return found


def has_uv() -> bool:
    """The locked one, beside this interpreter; installed if it is not there."""
    if Path(sys.executable).with_name("uv").exists():
        return True
    locked = [line for line in LOCK.read_text().splitlines() if line.startswith("uv==")]
    pip = (*PIP, "install", "--quiet", "--no-compile", "--no-deps", *locked)
    return subprocess.run(pip, check=False).returncode == 0


if __name__ == "__main__":
    sys.exit(install(*sys.argv[1:]))

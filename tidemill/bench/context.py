"""What a figure has to be read with: versions, machine, commit.

Torch is asked only if it is loaded, the driver's own program otherwise. It does not know what was
measured.
"""

from __future__ import annotations

import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import tidemill

_PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "flash-attn-4",
    "flash-attn-3",
    "flash-attn",
    "quack-kernels",
)
"""Whatever may have computed a figure."""


def context(name: str) -> dict[str, Any]:
    """Head of every benchmark's JSON file."""
    return {
        "benchmark": name,
        "engine": f"tidemill {tidemill.__version__}",
        "tidemill": tidemill.__version__,
        "commit": _commit(Path(tidemill.__file__).parents[1]),
        "python": platform.python_version(),
        "packages": {found: version for found in _PACKAGES if (version := _version(found))},
        "machine": platform.machine(),
        "gpu": _gpu(),
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _commit(root: Path) -> str | None:
    """The checkout that the package lies in, marked when files differ; None when installed."""
    if not (root / "pyproject.toml").is_file():
        return None
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() or None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _gpu() -> str | None:
    """That of this process, or those of the host where other processes have the models."""
    torch = sys.modules.get("torch")
    if torch is not None:
        return str(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return ", ".join(dict.fromkeys(done.stdout.split("\n")[:-1])) or None

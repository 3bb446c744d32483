"""`tidemill collect-env`: what a bug report needs. Never fails, whatever is missing or broken."""

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module, metadata

import tidemill
from engine_service.config import EngineConfig
from frontend.config import FrontendConfig
from tidemill.commands.launcher_config import LauncherConfig
from tidemill.runtime import options

_PACKAGES = (
    "torch",
    "numpy",
    "safetensors",
    "tokenizers",
    "transformers",
    "huggingface_hub",
    "grpcio",
    "protobuf",
    "fastapi",
    "uvicorn",
    "uvloop",
    "pydantic",
    "opentelemetry-sdk",
    "prometheus-client",
)
_SECRET = ("TOKEN", "KEY", "SECRET", "PASSWORD")


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectEnvOptions:
    """How to print."""

    json: bool = False
    """Print JSON."""


def run(argv: Sequence[str]) -> int:
    """Prints one section per question. Always returns 0."""
    (how,) = options.parse([CollectEnvOptions], argv, prog="tidemill collect-env", environ={})
    questions: dict[str, Callable[[], object]] = {
        "tidemill": lambda: tidemill.__version__,
        "python": lambda: f"{sys.version} at {sys.executable}",
        "platform": platform.platform,
        "cpu": _cpu,
        "memory": _memory,
        "packages": lambda: {name: _version(name) for name in _PACKAGES},
        "torch": _torch,
        "nvidia-smi": _nvidia_smi,
        "environment": _environment,
    }
    answers = {name: _answer(ask) for name, ask in questions.items()}
    print(json.dumps(answers, indent=2) if how.json else _as_text(answers))
    return 0


def _answer(ask: Callable[[], object]) -> object:
    try:
        return ask()
    except Exception as failure:  # a report about a broken machine must not break
        return f"cannot tell: {type(failure).__name__}: {failure}"


def _as_text(answers: dict[str, object]) -> str:
    lines = []
    for name, answer in answers.items():
        if not isinstance(answer, dict):
            lines.append(f"{name}: {answer}")
            continue
        lines += [f"{name}:", *(f"  {key}: {value}" for key, value in answer.items())]
    return "\n".join(lines)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _cpu() -> str:
    return f"{platform.machine()}, {len(os.sched_getaffinity(0))} of {os.cpu_count()} cores usable"


def _memory() -> str:
    page, pages = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_PHYS_PAGES")
    return f"{page * pages / 2**30:.1f} GiB"


def _torch() -> object:
    torch = import_module("torch")
    count = torch.cuda.device_count()
    return {
        "version": torch.__version__,
        "built for CUDA": torch.version.cuda,
        "threads": torch.get_num_threads(),
        "devices": [torch.cuda.get_device_name(i) for i in range(count)],
        "capabilities": [
            ".".join(map(str, torch.cuda.get_device_capability(i))) for i in range(count)
        ],
    }


def _nvidia_smi() -> str:
    if shutil.which("nvidia-smi") is None:
        return "not installed"
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=10, check=False)
    return (done.stdout or done.stderr).strip()


def _environment() -> dict[str, str]:
    """Variables that change what we do; values that look like secrets are not shown."""
    kinds = (EngineConfig, FrontendConfig, LauncherConfig)
    known = {"config", *(name for kind in kinds for name in options.settings_of(kind))}
    shown = {}
    for name, value in sorted(os.environ.items()):
        if not name.startswith(("TIDEMILL_", "CUDA_", "TORCH_", "OMP_", "HF_", "NCCL_", "GRPC_")):
            continue
        field = name.removeprefix("TIDEMILL_").lower()
        note = " (no such setting)" if name.startswith("TIDEMILL_") and field not in known else ""
        shown[name] = ("(hidden)" if any(word in name for word in _SECRET) else value) + note
    return shown

"""Finds the folder of a model: built in, local, or on the hub, and reads its small JSON files.

It does not read weights and does not know torch.
"""

from __future__ import annotations

import hashlib
import importlib.resources
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from engine_service.config import EngineConfig
from engine_service.worker.hub import download
from tidemill.runtime.errors import InvalidRequest, NotFound

Report = Callable[[str, int, int], None]
"""Called as (stage, done, total) during start-up; total 0: no number known."""

_Json = TypeVar("_Json", dict[str, Any], list[Any])
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A model's folder and what its JSON files say."""

    model_id: str
    folder: Path
    hf_config: dict[str, Any]
    generation_config: dict[str, Any]
    """Empty when the checkpoint has none."""
    added_tokens: dict[str, int]
    """Special tokens of the tokenizer's files, by content."""
    tokenizer_dir: str
    """Folder with the tokenizer's files; empty when there is none."""
    weight_version: str
    """Changes whenever the weights do: hub commit, or a digest of names, sizes and times."""


def fetch_checkpoint(config: EngineConfig, report: Report) -> Checkpoint:
    """Resolves `config.model` (built-in name, folder or hub id) to a checked local checkpoint.

    Raises NotFound, Unavailable or InvalidRequest, each saying what to do.
    """
    folder, version = _resolve(config, report)
    tokenizer_dir = _tokenizer_dir(config, folder)
    return Checkpoint(
        model_id=config.model,
        folder=folder,
        hf_config=_read_config(folder),
        generation_config=read_json(folder / "generation_config.json") or {},
        added_tokens=_added_tokens(Path(tokenizer_dir)) if tokenizer_dir else {},
        tokenizer_dir=tokenizer_dir,
        weight_version=version or _digest(folder, config),
    )


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file, None where there is no file; raises InvalidRequest otherwise."""
    return _read_json(path, dict)


def read_json_list(path: Path) -> list[dict[str, Any]]:
    """The objects of the array in a JSON file, none where there is no file."""
    return [one for one in _read_json(path, list) or () if isinstance(one, dict)]


def _read_json(path: Path, kind: type[_Json]) -> _Json | None:
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidRequest(
            f"{path} is not valid JSON ({error}); it is probably truncated: fetch the file again",
            reason="CHECKPOINT_CORRUPT",
            param="model",
        ) from error
    if not isinstance(content, kind):
        wanted = "object" if kind is dict else "array"
        raise InvalidRequest(
            f"{path} must hold a JSON {wanted}, found {type(content).__name__}",
            reason="CHECKPOINT_CORRUPT",
            param="model",
        )
    return content


def builtin_models() -> dict[str, Path]:
    """Name to folder of the models that come with the package."""
    root = Path(str(importlib.resources.files("tidemill"))) / "builtin"
    return {path.parent.name: path.parent for path in sorted(root.glob("*/config.json"))}


def _resolve(config: EngineConfig, report: Report) -> tuple[Path, str]:
    """(folder, hub commit or "")."""
    name = config.model
    builtin = builtin_models()
    if name in builtin:
        return builtin[name], ""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder, ""
    if folder.is_file():
        raise InvalidRequest(
            f"model {name!r} is a file; give the folder that holds config.json", param="model"
        )
    if not _HUB_ID.fullmatch(name) or name.startswith("."):
        raise NotFound(
            f"model {name!r} is neither built in ({', '.join(builtin) or 'none installed'}) nor an "
            "existing folder; a hub model is written owner/name",
            reason="MODEL_NOT_FOUND",
            param="model",
        )
    weights = config.load_format != "dummy"
    return download(name, config.revision, weights=weights, report=report)


def _read_config(folder: Path) -> dict[str, Any]:
    hf_config = read_json(folder / "config.json")
    if hf_config is None:
        raise NotFound(
            f"{folder} has no config.json; point --model at a folder in Hugging Face format "
            "(config.json, tokenizer files, *.safetensors)",
            reason="CONFIG_MISSING",
            param="model",
        )
    return hf_config


def _tokenizer_dir(config: EngineConfig, folder: Path) -> str:
    """The folder GetTokenizer serves; an explicit one must hold a tokenizer."""
    chosen = folder if config.tokenizer is None else Path(config.tokenizer).expanduser()
    if any((chosen / name).is_file() for name in _TOKENIZER_FILES):
        return str(chosen)
    if config.tokenizer is None:
        return ""
    raise NotFound(
        f"tokenizer folder {config.tokenizer!r} has none of {', '.join(_TOKENIZER_FILES)}",
        reason="TOKENIZER_NOT_FOUND",
        param="tokenizer",
    )


def _added_tokens(folder: Path) -> dict[str, int]:
    """Added tokens of whichever files there are; later files win."""
    tokens = dict(read_json(folder / "added_tokens.json") or {})
    tokenizer_config = read_json(folder / "tokenizer_config.json") or {}
    for token_id, entry in (tokenizer_config.get("added_tokens_decoder") or {}).items():
        tokens[entry["content"]] = int(token_id)
    tokenizer = read_json(folder / "tokenizer.json") or {}
    for entry in tokenizer.get("added_tokens") or []:
        tokens[entry["content"]] = entry["id"]
    return tokens


def _digest(folder: Path, config: EngineConfig) -> str:
    """Identity of local weights without reading them: file names, sizes and change times."""
    digest = hashlib.sha256(f"{config.load_format == 'dummy'} {config.seed}".encode())
    for path in sorted([*folder.glob("*.safetensors"), folder / "config.json"]):
        stat = path.stat()
        digest.update(f"{path.name} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]

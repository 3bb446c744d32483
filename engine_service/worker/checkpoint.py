"""Finds the folder of a model: built in, local, or on the hub, and reads its small JSON files.

It does not read weights and does not know torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine_service.config import EngineConfig
from engine_service.hf_overrides import check_overrides, overridden, version_under
from engine_service.model_folder import CONFIG, builtin_models, folder_of, read_config
from engine_service.worker.files import MANIFEST
from engine_service.worker.hub import download
from engine_service.worker.json_files import read_json
from engine_service.worker.shards import Manifest, parse_manifest
from tidemill.runtime.errors import InvalidRequest, NotFound

Report = Callable[[str, int, int], None]
"""Called as (stage, done, total) during start-up; total 0: no number known."""

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A model's folder and what its JSON files say."""

    model_id: str
    folder: Path
    hf_config: dict[str, Any]
    """With the operator's overrides."""
    generation_config: dict[str, Any]
    """Empty when the checkpoint has none."""
    added_tokens: dict[str, int]
    """Special tokens of the tokenizer's files, by content."""
    tokenizer_dir: str
    """Folder with the tokenizer's files; empty when there is none."""
    weight_version: str
    """Changes whenever the weights do: hub commit, or a digest of names, sizes and times
    (of a built-in model: contents); and with what is said over config.json."""
    manifest: Manifest | None = None
    """Of a folder that was cut for a number of ranks."""


def fetch_checkpoint(config: EngineConfig, report: Report) -> Checkpoint:
    """Resolves `config.model` (built-in name, folder or hub id) to a checked local checkpoint.

    Raises NotFound, Unavailable or InvalidRequest, each saying what to do.
    """
    check_overrides(overrides := config.hf_overrides)
    folder, version = _resolve(config, report)
    tokenizer_dir = _tokenizer_dir(config, folder)
    manifest = parse_manifest(read_json(folder / MANIFEST))
    return Checkpoint(
        model_id=config.model,
        folder=folder,
        hf_config=overridden(_with_activation(read_config(folder), folder), overrides),
        generation_config=read_json(folder / "generation_config.json") or {},
        added_tokens=_added_tokens(Path(tokenizer_dir)) if tokenizer_dir else {},
        tokenizer_dir=tokenizer_dir,
        weight_version=version_under(version or _digest(folder, config, manifest), overrides),
        manifest=manifest,
    )


def _with_activation(hf_config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The config with the activation of a cross-encoder's head, which sentence-transformers writes
    into a file of its own from 5.4 on, and wrote into config.json before."""
    beside = read_json(folder / "config_sentence_transformers.json") or {}
    if beside.get("model_type") != "CrossEncoder" or not beside.get("activation_fn"):
        return hf_config
    wishes = hf_config.get("sentence_transformers") or {}
    told = {**wishes, "activation_fn": beside["activation_fn"]}
    return {**hf_config, "sentence_transformers": told}


def _resolve(config: EngineConfig, report: Report) -> tuple[Path, str]:
    """(folder, hub commit or "")."""
    folder = folder_of(config.model)
    if folder is not None:
        return folder, ""
    weights = config.load_format != "dummy"
    return download(config.model, config.revision, weights=weights, report=report)


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
    for name, key in (
        ("tokenizer_config.json", "added_tokens_decoder"),
        ("tokenizer.json", "added_tokens"),
    ):
        listed = (read_json(folder / name) or {}).get(key) or []
        try:
            # One has the entries by their ids, the other one has the ids in the entries.
            pairs = listed.items() if isinstance(listed, dict) else [(e["id"], e) for e in listed]
            tokens |= {entry["content"]: int(token_id) for token_id, entry in pairs}
        except (TypeError, KeyError, ValueError) as failure:
            raise InvalidRequest(
                f"{folder / name}: {key} is not as tokenizers write it ({failure!r}); fetch the "
                "file again",
                reason="CHECKPOINT_CORRUPT",
                param="model",
            ) from failure
    return tokens


def _digest(folder: Path, config: EngineConfig, manifest: Manifest | None) -> str:
    """Identity of local weights without reading them: file names, sizes and change times; of
    shards, that of what they were made from. Built-in ones are small, and every installation writes
    them at another time: there it is what they say."""
    is_dummy = config.load_format == "dummy"
    if manifest is not None and not is_dummy:
        return manifest.weight_version
    is_builtin = config.model in builtin_models()
    digest = hashlib.sha256(f"{is_dummy} {config.seed if is_dummy else 0}".encode())
    for path in sorted([*folder.glob("*.safetensors"), folder / CONFIG]):
        stat = path.stat()
        said = hashlib.sha256(path.read_bytes()).hexdigest() if is_builtin else stat.st_mtime_ns
        digest.update(f"{path.name} {stat.st_size} {said}\n".encode())
    return digest.hexdigest()[:16]

"""What `model` names: a model that is built in, a folder of this machine, or a hub id.

It reads config.json and nothing else, and imports neither torch nor the hub's library, so that a
name that cannot work is refused before anything starts. It downloads nothing.
"""

from __future__ import annotations

import importlib.resources
import re
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from engine_service.worker.json_files import read_json
from tidemill.runtime.errors import InvalidRequest, NotFound

CONFIG = "config.json"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def builtin_models() -> dict[str, Path]:
    """Name to folder of the models that come with the package."""
    root = Path(str(importlib.resources.files("tidemill"))) / "builtin"
    return {path.parent.name: path.parent for path in sorted(root.glob(f"*/{CONFIG}"))}


def check_model(name: str) -> None:
    """Raises what `folder_of` and `read_config` raise; of a hub id nothing is known yet."""
    folder = folder_of(name)
    if folder is not None:
        read_config(folder)


def folder_of(name: str) -> Path | None:
    """The folder of a model, None of one that is to be had from the hub.

    Raises NotFound for a name that is nothing of the kind, InvalidRequest for a file.
    """
    builtin = builtin_models()
    if name in builtin:
        return builtin[name]
    try:
        folder = Path(name).expanduser()
        if folder.is_dir():
            return folder
        if folder.is_file():
            beside = (folder.parent / CONFIG).is_file()
            which = f", {str(folder.parent)!r}" if beside else ""
            raise InvalidRequest(
                f"model {name!r} is a file; give the folder that holds {CONFIG}{which}",
                param="model",
            )
    except (OSError, RuntimeError) as error:  # no access, too long a name; nobody's ~
        raise _unknown(name, str(error), builtin) from error
    if not _HUB_ID.fullmatch(name) or name.startswith("."):
        raise _unknown(name, f"{folder.absolute()} does not exist", builtin)
    return None


def read_config(folder: Path) -> dict[str, Any]:
    """What config.json says. Raises NotFound where there is none, InvalidRequest for one that
    cannot be read."""
    try:
        found = read_json(folder / CONFIG)
    except OSError as error:
        raise InvalidRequest(f"{folder / CONFIG} cannot be read: {error}", param="model") from error
    if found is None:
        below = sorted(path.parent for path in folder.glob(f"*/{CONFIG}"))
        hint = f"; did you mean {str(below[0])!r}?" if below else ""
        raise NotFound(
            f"{folder} has no {CONFIG}; point --model at a folder in Hugging Face format "
            f"({CONFIG}, tokenizer files, *.safetensors){hint}",
            reason="CONFIG_MISSING",
            param="model",
        )
    return found


def _unknown(name: str, looked: str, builtin: dict[str, Path]) -> NotFound:
    near = get_close_matches(name, [*builtin, *_siblings(name)], n=1)
    hint = f"; did you mean {near[0]!r}? A" if near else "; a"
    return NotFound(
        f"model {name!r} is neither built in ({', '.join(builtin) or 'none installed'}) nor an "
        f"existing folder ({looked}){hint} hub model is written owner/name",
        reason="MODEL_NOT_FOUND",
        param="model",
    )


def _siblings(name: str) -> list[str]:
    """Folders of models that stand where this one was looked for, written like it."""
    written = name.rstrip("/")
    start = written[: -len(Path(written).name)] if Path(written).name else written
    try:
        found = Path(start).expanduser().glob(f"*/{CONFIG}")
        return sorted(start + path.parent.name for path in found)
    except (OSError, RuntimeError):
        return []

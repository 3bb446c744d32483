"""Downloads a model's files from the hub and turns its failures into typed errors.

It does not know what the files mean. The library loads its parts when they are asked for: no model
that is a folder here waits for them (0.2 s of every start).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from tqdm.auto import tqdm

from engine_service.model_folder import CONFIG
from tidemill.runtime.errors import InvalidRequest, NotFound, ServiceError, Unavailable

_SMALL_FILES = ["*.json", "*.jinja", "*.txt", "tokenizer.model", "LICENSE*"]
_WEIGHT_FILES = ["*.safetensors"]
# Second copies of the same weights: Mistral's own format, and folders with other exports.
_UNWANTED = ["consolidated*", "*/*"]
# How a sentence-transformers model pools, which it says in a folder of that module.
_MODULES, _POOLING = "modules.json", ["*_Pooling/config.json"]
_ASKED_S = 3.0  # a hub that answers later is asked again by the download
_LOG = logging.getLogger("tidemill.engine")


def refuse_unknown(model: str, revision: str | None) -> None:
    """Raises what `download` would for an id that the hub does not know, and downloads nothing.

    A model that was downloaded before is not asked about, and a hub that cannot be asked (offline,
    no network) is no reason to refuse.
    """
    try:
        kept = huggingface_hub.try_to_load_from_cache(model, CONFIG, revision=revision)
        if not isinstance(kept, str):
            huggingface_hub.HfApi().model_info(model, revision=revision, timeout=_ASKED_S)
    except (RepositoryNotFoundError, RevisionNotFoundError, HFValidationError) as error:
        raise _typed(error, model, revision) from error
    except Exception as error:  # of several libraries, and no two versions agree on which
        _LOG.debug("the hub was not asked about %s: %s", model, error)


def download(
    model: str,
    revision: str | None,
    *,
    weights: bool,
    report: Callable[[str, int, int], None],
) -> tuple[Path, str]:
    """(folder, commit) of a hub model; only files that are missing are fetched.

    `report("download", bytes, total bytes)`. Raises NotFound, InvalidRequest or Unavailable.
    """
    report("download", 0, 0)
    try:
        folder = huggingface_hub.snapshot_download(
            model,
            revision=revision,
            allow_patterns=_SMALL_FILES + (_WEIGHT_FILES if weights else []),
            ignore_patterns=_UNWANTED,
            tqdm_class=_reporting(report),
        )
        commit = Path(folder).name
        if (Path(folder) / _MODULES).exists():
            silent = _reporting(lambda *_: None)
            huggingface_hub.snapshot_download(
                model, revision=commit, allow_patterns=_POOLING, tqdm_class=silent
            )
    except (HfHubHTTPError, LocalEntryNotFoundError, HFValidationError, OSError) as error:
        raise _typed(error, model, revision) from error
    return Path(folder), commit


def _typed(error: Exception, model: str, revision: str | None) -> ServiceError:
    """What went wrong and what to do about it; the most specific class is asked first."""
    where = f"model {model!r}" + (f" at revision {revision!r}" if revision else "")
    if isinstance(error, GatedRepoError):
        return InvalidRequest(
            f"{where} is gated: accept its terms on its hub page, then set HF_TOKEN to a token of "
            "that account",
            reason="MODEL_GATED",
            param="model",
        )
    if isinstance(error, RevisionNotFoundError):
        return NotFound(
            f"{where} does not exist: check --revision (branch, tag or commit)",
            reason="REVISION_NOT_FOUND",
            param="revision",
        )
    if isinstance(error, RepositoryNotFoundError):
        return NotFound(
            f"{where} is not on the hub, or private: check the spelling, or set HF_TOKEN",
            reason="MODEL_NOT_FOUND",
            param="model",
        )
    if isinstance(error, HFValidationError):
        return InvalidRequest(f"{where} is not a valid hub id: {error}", param="model")
    if isinstance(error, LocalEntryNotFoundError):
        return Unavailable(
            f"{where} is not (completely) in the local cache and the hub cannot be reached: "
            "connect, unset HF_HUB_OFFLINE, or give a local folder",
            reason="HUB_UNREACHABLE",
            param="model",
        )
    return Unavailable(
        f"download of {where} failed: {error}; what arrived is kept, start again to resume",
        reason="DOWNLOAD_FAILED",
        param="model",
    )


def _reporting(report: Callable[[str, int, int], None]) -> type[tqdm]:
    """A progress bar that draws nothing and reports the bytes written."""

    class Reporting(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            # Of the two byte counters the other one counts the network, compressed.
            self._reports = kwargs.get("unit") == "B" and kwargs.get("desc") != "Downloading bytes"
            kwargs.pop("name", None)
            super().__init__(*args, **{**kwargs, "disable": True})

        def update(self, n: float | None = 1) -> bool | None:
            self.n += n or 0
            if self._reports:
                report("download", int(self.n), int(self.total or 0))
            return None

    return Reporting

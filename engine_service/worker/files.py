"""The safetensors files of a checkpoint: which there are, that they are whole, what stands in them.

Everything here is found out from their headers, before anything is loaded. It does not know models.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open

from engine_service.worker.json_files import read_json
from tidemill.runtime.errors import InvalidRequest, NotFound, ServiceError, Unsupported

MANIFEST = "tidemill_shards.json"
"""Beside files of ranks (worker/shards.py), of which each has a part of the weights."""
_INDEX = "model.safetensors.index.json"
_WHOLE = "model.safetensors"
"""All weights, whatever stands beside it: variants such as model.fp16.safetensors are the same ones
again."""
_PICKLES = frozenset({".bin", ".ckpt", ".pkl", ".pt", ".pth"})
_LFS_POINTER = b"version https://git-lfs"


class OnDisk(Protocol):
    """A tensor of a file, of which slices can be read."""

    def get_shape(self) -> list[int]: ...

    def get_dtype(self) -> str: ...

    def __getitem__(self, where: Any) -> torch.Tensor: ...


class OpenFile(Protocol):
    """A safetensors file, mapped from disk: what is copied of it is read then."""

    def keys(self) -> list[str]: ...

    def get_slice(self, name: str) -> OnDisk: ...


class Stored(NamedTuple):
    """Where a tensor stands, its whole shape, and its number format as safetensors calls it."""

    path: Path
    shape: tuple[int, ...]
    number_format: str


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint, checked to exist; raises NotFound otherwise."""
    index = read_json(folder / _INDEX)
    if index is None and (folder / _WHOLE).is_file():
        return [folder / _WHOLE]
    if index is None:
        if any(folder.glob("rank-*-of-*.safetensors")):
            raise NotFound(
                f"{folder} has files of ranks (tidemill shard) and no {MANIFEST}, which says what "
                "they are: copy it too, or shard the source anew",
                reason="SHARD_MISSING",
                param="model",
            )
        found = sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("*.safetensors"))
        if found:
            return found
        _refuse_pickles(folder)
        raise NotFound(
            f"{folder} has no *.safetensors files; this engine reads no other weight format "
            "(convert with transformers' save_pretrained), or use --load-format dummy",
            reason="WEIGHTS_MISSING",
            param="model",
        )
    named = index.get("weight_map")
    if not isinstance(named, dict) or not all(isinstance(one, str) for one in named.values()):
        raise corrupt(folder / _INDEX, "it has no weight_map of names of files")
    shards = sorted(set(named.values()))
    missing = [name for name in shards if not (folder / name).is_file()]
    if missing:
        raise NotFound(
            f"{len(missing)} of {len(shards)} weight files named by {_INDEX} are missing from "
            f"{folder}, the first is {missing[0]}: fetch the checkpoint again",
            reason="SHARD_MISSING",
            param="model",
        )
    return [folder / name for name in shards]


def survey(files: Iterable[Path]) -> dict[str, Stored]:
    """All tensors by name; raises InvalidRequest for a file that is not whole, and for a tensor
    that stands in two."""
    found: dict[str, Stored] = {}
    for path in files:
        with reading(path) as file:
            for name in file.keys():  # noqa: SIM118 - the file object is no mapping
                if name in found:
                    raise corrupt(path, f"tensor {name} stands in a second file too")
                tensor = file.get_slice(name)
                found[name] = Stored(path, tuple(tensor.get_shape()), tensor.get_dtype())
    return found


@contextmanager
def reading(path: Path) -> Iterator[OpenFile]:
    """The open file; raises InvalidRequest where it is none, or ends too early."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            yield file
    except (SafetensorError, OSError) as error:
        with path.open("rb") as raw:
            pointer = raw.read(len(_LFS_POINTER)) == _LFS_POINTER
        reason = "it is a Git LFS pointer: run `git lfs pull`" if pointer else str(error)
        raise corrupt(path, reason) from error


def corrupt(path: Path, reason: str) -> ServiceError:
    """What to say of a file that is there and cannot be used."""
    return InvalidRequest(
        f"{path} cannot be read as weights ({reason}; {path.stat().st_size} bytes): it is corrupt "
        "or truncated, fetch the file again",
        reason="CHECKPOINT_CORRUPT",
        param="model",
    )


def _refuse_pickles(folder: Path) -> None:
    """A pickle runs whatever code its author put into it, so none is ever opened."""
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLES)
    if pickles:
        raise Unsupported(
            f"{folder} has its weights in {pickles[0]}, a pickle: loading one runs whatever code "
            "is in it. This engine reads *.safetensors alone; convert where you trust the file: "
            "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER) with "
            "transformers, or take a revision of the model that has safetensors",
            reason="PICKLED_WEIGHTS",
            param="model",
        )

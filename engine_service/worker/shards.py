"""Checkpoints that were cut for a number of ranks ahead of time (`tidemill shard`): a file for each
rank with what it holds, under the checkpoint's names.

A manifest says what they were made from and for whom. It reads and writes no weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from engine_service.distributed import Group
from engine_service.layers.slots import Piece, Slot, Slots
from engine_service.worker.files import MANIFEST, Stored
from tidemill.runtime.errors import InvalidRequest, NotFound, Unsupported

FORMAT = 1
"""Of the folder; raised when files of before can no longer be read as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What stands beside the files."""

    format: int = FORMAT
    tensor_parallel_size: int
    expert_parallel: bool
    architecture: str
    source: str
    """The model that they were made from, as it was named."""
    weight_version: str
    """Of the source: the weights are the same ones."""
    num_bytes: tuple[int, ...]
    """Of each rank's file."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def parse_manifest(found: dict[str, Any] | None) -> Manifest | None:
    """From its JSON; None stays None. Raises Unsupported or InvalidRequest for one that this build
    cannot read."""
    if found is None:
        return None
    if found.get("format") != FORMAT:
        raise Unsupported(
            f"{MANIFEST} has format {found.get('format')!r}, this build reads format {FORMAT}: "
            "shard the source anew with it",
            reason="SHARDS_FORMAT",
            param="model",
        )
    try:
        manifest = Manifest(**found | {"num_bytes": tuple(found["num_bytes"])})
        if len(manifest.num_bytes) != (size := manifest.tensor_parallel_size):
            raise ValueError(f"{len(manifest.num_bytes)} sizes of files for {size!r} ranks")
        return manifest
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidRequest(
            f"{MANIFEST} is no manifest of shards ({error}): shard the source anew",
            reason="CHECKPOINT_CORRUPT",
            param="model",
        ) from error


def file_name(rank: int, size: int) -> str:
    """Of a rank's file."""
    return f"rank-{rank:05}-of-{size:05}.safetensors"


def rank_file(folder: Path, manifest: Manifest, group: Group) -> Path:
    """The file of a rank, checked to be of its group and whole; nobody asks for the others'."""
    _check_made_for(folder, manifest, group)
    path = folder / file_name(group.rank, group.size)
    if not path.is_file():
        raise NotFound(
            f"{path.name}, the shard of rank {group.rank}, is missing from {folder}: fetch it "
            f"again, or shard {manifest.source} anew (tidemill shard)",
            reason="SHARD_MISSING",
            param="model",
        )
    size, wanted = path.stat().st_size, manifest.num_bytes[group.rank]
    if size != wanted:
        raise InvalidRequest(
            f"{path} has {size} bytes where {MANIFEST} says {wanted}: it is truncated or of "
            "another making, fetch it again",
            reason="CHECKPOINT_CORRUPT",
            param="model",
        )
    return path


def _check_made_for(folder: Path, manifest: Manifest, group: Group) -> None:
    made_for, experts = manifest.tensor_parallel_size, manifest.expert_parallel
    if (made_for, experts) == (group.size, group.whole_experts):
        return
    made, has = f"tensor_parallel_size {made_for}", str(group.size)
    wanted = f"--tensor-parallel-size {made_for}"
    if experts != group.whole_experts:
        made += f" and expert_parallel {experts}"
        has += f" and {group.whole_experts}"
        wanted += " --expert-parallel" if experts else " --no-expert-parallel"
    raise InvalidRequest(
        f"{folder} was made for {made}, this engine has {has}: pass {wanted}, or shard "
        f"{manifest.source} anew for other sizes (tidemill shard)",
        reason="SHARDS_DIFFER",
        param="expert_parallel" if made_for == group.size else "tensor_parallel_size",
    )


class Held(NamedTuple):
    """A tensor of a rank's file: which part of the checkpoint's it is, and what takes it."""

    where: tuple[slice, ...]
    slot: Slot


def held_of(name: str, slot: Slot) -> dict[str, Held]:
    """Each share that a slot takes is a whole tensor in a rank's file: under the slot's name, and
    with a number behind it where the slot takes several. By what it is called there."""
    shares: dict[str, tuple[tuple[slice, ...], list[torch.Tensor]]] = {}
    for view, where in slot.pieces:  # slices have no hash
        shares.setdefault(str(where), (where, []))[1].append(view)
    found = {}
    for index, (where, views) in enumerate(shares.values()):
        sizes = [
            len(range(*part.indices(length)))
            for part, length in zip(where, slot.shape, strict=False)
        ]
        shape = (*sizes, *slot.shape[len(sizes) :])
        own = Slot(shape, tuple(map(Piece, views)))
        found[f"{name}#{index}" if index else name] = Held(where, own)
    return found


def held(slots: Slots) -> Slots:
    """What a rank's file holds of these slots."""
    return {
        label: one.slot
        for name, slot in slots.items()
        for label, one in held_of(name, slot).items()
    }


def of_stage(slots: Slots, stored: Mapping[str, Stored]) -> dict[str, Stored]:
    """Of a rank's file what this stage of its layers takes; the file is for engines of any number
    of stages."""
    others = {name for name, slot in slots.items() if not slot.pieces}
    return {label: one for label, one in stored.items() if label.partition("#")[0] not in others}

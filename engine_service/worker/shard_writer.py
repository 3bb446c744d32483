"""Cuts a checkpoint for a number of ranks: reads what each will hold, and writes it file by file.

No more than one tensor's share is in memory at a time. It computes nothing.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

from engine_service.config import EngineConfig
from engine_service.distributed import Group
from engine_service.hf_overrides import overridden
from engine_service.limits import check_count
from engine_service.model_folder import CONFIG, read_config
from engine_service.models.base import REGISTRY, CausalModel
from engine_service.models.sharing import check_fit
from engine_service.worker.checkpoint import Checkpoint, Report, fetch_checkpoint
from engine_service.worker.files import MANIFEST, Stored, reading, survey, weight_files
from engine_service.worker.shards import Manifest, file_name, held_of
from engine_service.worker.weights import Part, match, read_traits
from tidemill.runtime.errors import FailedPrecondition, InvalidRequest

_SMALL = (".json", ".jinja", ".txt", ".model")
_INDEX = ".safetensors.index.json"
_ALIGN = 8


class _Cut(NamedTuple):
    """A tensor of a rank's file: of which one of the checkpoint, and which part of it."""

    label: str
    part: Part
    where: tuple[slice, ...]
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        size = _BYTES[self.part.stored.number_format]
        for length in self.shape:
            size *= length
        return size


_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


def write_shards(config: EngineConfig, out: Path, report: Report) -> Manifest:
    """A folder that engines with `config.tensor_parallel_size` take for `config.model`: there when
    all of it is, and untouched if it is there already. `report("shard", bytes, total bytes)`.

    Raises what loading the model would, and FailedPrecondition.
    """
    check_count(config.tensor_parallel_size, config.num_ranks)
    if out.exists():
        raise FailedPrecondition(
            f"{out} is there already: name a folder that is not, or remove it", param="output"
        )
    if not out.parent.is_dir():
        raise FailedPrecondition(f"{out.parent} is no folder: make it first", param="output")
    size = config.tensor_parallel_size
    group = Group(0, size, whole_experts=config.expert_parallel)
    _check_size(config, group, report)
    checkpoint = fetch_checkpoint(config, report)
    if checkpoint.manifest is not None:
        made_for = checkpoint.manifest.tensor_parallel_size
        raise InvalidRequest(
            f"{checkpoint.folder} was made for tensor_parallel_size {made_for} already; shard its "
            f"source, {checkpoint.manifest.source}",
            param="model",
        )
    stored = survey(weight_files(checkpoint.folder))
    ranks = [_cuts(checkpoint, stored, replace(group, rank=rank)) for rank in range(size)]
    total = sum(cut.num_bytes for cuts in ranks for cut in cuts)
    done = 0

    def wrote(count: int) -> None:
        nonlocal done
        done += count
        report("shard", done, total)

    with _folder(out) as folder:
        _copy_small(checkpoint.folder, folder, config.hf_overrides)
        sizes = tuple(
            _write(folder / file_name(rank, size), cuts, wrote) for rank, cuts in enumerate(ranks)
        )
        manifest = Manifest(
            tensor_parallel_size=size,
            expert_parallel=config.expert_parallel,
            architecture=read_traits(checkpoint).architecture,
            source=config.model,
            weight_version=checkpoint.weight_version,
            num_bytes=sizes,
        )
        _put(folder / MANIFEST, (json.dumps(manifest.to_json(), indent=2) + "\n").encode())
    return manifest


def _check_size(config: EngineConfig, group: Group, report: Report) -> None:
    """Before weights are downloaded, which may take an hour."""
    small = fetch_checkpoint(replace(config, load_format="dummy"), report)
    check_fit(small.hf_config, read_traits(small), group, num_stages=1)


def _cuts(checkpoint: Checkpoint, stored: dict[str, Stored], group: Group) -> list[_Cut]:
    """What a rank holds, in the order in which the checkpoint has it."""
    model = _outline(checkpoint, group)
    cuts = []
    for part in match(model, model.weight_slots(), stored):
        for label, one in held_of(part.slot_name, part.slot).items():
            cuts.append(_Cut(label, part, one.where, one.slot.shape))
    return cuts


def _outline(checkpoint: Checkpoint, group: Group) -> CausalModel:
    """The model as a rank holds it, without memory behind it."""
    kind, traits = REGISTRY.find(checkpoint.hf_config), read_traits(checkpoint)
    nowhere: dict[str, Any] = {"device": torch.device("meta"), "dtype": torch.float32}
    return kind.create(traits, checkpoint.hf_config, group=group, **nowhere)


@contextmanager
def _folder(out: Path) -> Iterator[Path]:
    """A folder beside `out` that takes its name when everything is in it, on the disk too, or goes
    again."""
    with _writing(out):
        folder = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        yield folder
        with _writing(out):
            folder.chmod(0o755)
            for inner in (*(path for path in folder.iterdir() if path.is_dir()), folder):
                _settle(inner)
            os.rename(folder, out)
            _settle(out.parent)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _copy_small(source: Path, folder: Path, hf_overrides: dict[str, Any]) -> None:
    """What is not weights: configurations, the tokenizer, how embeddings are pooled. The weights
    are cut by config.json with its overrides, so whoever reads them needs it like that."""
    for path in [*source.glob("*"), *source.glob("*/config.json")]:
        is_small = path.suffix in _SMALL or path.name.startswith("LICENSE")
        if path.is_file() and is_small and not path.name.endswith(_INDEX):
            target, content = folder / path.relative_to(source), path.read_bytes()
            with _writing(target):
                target.parent.mkdir(exist_ok=True)
            _put(target, content)
    if hf_overrides:
        said = overridden(read_config(source), hf_overrides)
        _put(folder / CONFIG, (json.dumps(said, indent=2) + "\n").encode())


def _put(path: Path, content: bytes) -> None:
    """Writes a file, which outlives the machine from here on."""
    with _writing(path), path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _settle(folder: Path) -> None:
    """The same for the names in a folder, where its file system can say so."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):
            os.fsync(opened)
    finally:
        os.close(opened)


def _write(path: Path, cuts: list[_Cut], wrote: Callable[[int], None]) -> int:
    """A safetensors file (huggingface.co/docs/safetensors: length of the header, header, bytes);
    its library would want all tensors in memory. Returns its size."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for cut in cuts:
        stop = offset + cut.num_bytes
        header[cut.label] = {
            "dtype": cut.part.stored.number_format,
            "shape": cut.shape,
            "data_offsets": (offset, stop),
        }
        offset = stop
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGN)
    with _writing(path), path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for source, own in groupby(cuts, key=lambda cut: cut.part.stored.path):
            _append(file, source, own, wrote)
        file.flush()
        os.fsync(file.fileno())
        return file.tell()


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Raises FailedPrecondition where nothing may be written, there is no more room, or the disk
    fails."""
    try:
        yield
    except OSError as failure:
        raise FailedPrecondition(
            f"cannot write {path}: {failure.strerror}; name a folder that may be made, on a disk "
            "with room for the whole checkpoint",
            param="output",
        ) from failure


def _append(
    file: BinaryIO, source: Path, cuts: Iterator[_Cut], wrote: Callable[[int], None]
) -> None:
    with reading(source) as stored:
        for cut in cuts:
            share = stored.get_slice(cut.part.name)[cut.where or ...].contiguous()
            with _writing(Path(file.name)):  # not what is read fails then
                file.write(share.view(torch.uint8).numpy().data)
            wrote(cut.num_bytes)

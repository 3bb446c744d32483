"""Builds a model and fills its parameters, tensor by tensor, without a second copy in memory.

It does not know which model it loads: names and views come from `CausalModel.weight_slots`.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from engine_service.config import EngineConfig
from engine_service.models.base import REGISTRY, CausalModel, ModelTraits
from engine_service.models.hf_config import token_ids
from engine_service.worker.checkpoint import Checkpoint, Report, read_json
from tidemill.runtime.errors import InvalidRequest, NotFound, ServiceError, Unsupported

_INDEX = "model.safetensors.index.json"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_PICKLES = frozenset({".bin", ".ckpt", ".pkl", ".pt", ".pth"})
_LFS_POINTER = b"version https://git-lfs"
_BASE = "model."
"""Ahead of the names of a decoder that was saved with its head; embedding models are saved bare."""
_DUMMY_EMBEDDING_STD = 0.02


def read_traits(checkpoint: Checkpoint) -> ModelTraits:
    """Traits of the checkpoint; raises Unsupported for an unknown architecture or trait.

    Stop tokens of generation_config.json are added to those of config.json.
    """
    kind = REGISTRY.find(checkpoint.hf_config)
    traits = kind.read_traits(checkpoint.hf_config, checkpoint.added_tokens)
    more = token_ids(checkpoint.generation_config.get("eos_token_id"))
    stops = tuple(dict.fromkeys((*traits.eos_token_ids, *more)))
    return dataclasses.replace(traits, eos_token_ids=stops)


def resolve_dtype(
    config: EngineConfig,
    traits: ModelTraits,
    device: torch.device,
    *,
    compute: tuple[int, int] | None = None,
) -> torch.dtype:
    """auto: the checkpoint's own on CUDA, float32 on CPU.

    GPUs of a compute capability below 8.0 have no bfloat16: there auto takes float16 instead, and
    bfloat16 is refused (Unsupported).
    """
    lacks_bfloat16 = compute is not None and compute < (8, 0)
    if config.dtype == "auto":
        own = "float32" if device.type == "cpu" else traits.dtype
        return _DTYPES["float16" if lacks_bfloat16 and own == "bfloat16" else own]
    if lacks_bfloat16 and config.dtype == "bfloat16":
        raise Unsupported(
            "dtype 'bfloat16' needs a GPU of compute capability 8.0, this is"
            f" {'.'.join(map(str, compute or ()))}; pass --dtype float16",
            param="dtype",
        )
    return _DTYPES[config.dtype]


def load_model(
    config: EngineConfig,
    checkpoint: Checkpoint,
    *,
    device: torch.device,
    dtype: torch.dtype,
    report: Report,
) -> CausalModel:
    """A model ready for inference. `report("weights", done, total)` counts tensors.

    Raises InvalidRequest, NotFound or Unsupported naming the file or tensor at fault.
    """
    if config.tensor_parallel_size > 1:
        raise Unsupported(
            f"tensor_parallel_size {config.tensor_parallel_size} is not supported by this build; "
            "use 1",
            param="tensor_parallel_size",
        )
    kind = REGISTRY.find(checkpoint.hf_config)
    traits = read_traits(checkpoint)
    model = kind.create(traits, checkpoint.hf_config, device=device, dtype=dtype)
    slots = model.weight_slots()
    with torch.no_grad():
        if config.load_format == "dummy":
            _fill_random(slots, config.seed, report)
        else:
            _fill_from_files(model, slots, weight_files(checkpoint.folder), report)
        model.after_load()
    return model.eval()


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


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint, checked to exist; raises NotFound otherwise."""
    index = read_json(folder / _INDEX)
    if index is None:
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
    if not isinstance(index.get("weight_map"), dict):
        raise _corrupt(folder / _INDEX, "it has no weight_map")
    shards = sorted(set(index["weight_map"].values()))
    missing = [name for name in shards if not (folder / name).is_file()]
    if missing:
        raise NotFound(
            f"{len(missing)} of {len(shards)} weight files named by {_INDEX} are missing from "
            f"{folder}, the first is {missing[0]}: fetch the checkpoint again",
            reason="SHARD_MISSING",
            param="model",
        )
    return [folder / name for name in shards]


def _fill_from_files(
    model: CausalModel, slots: dict[str, torch.Tensor], files: list[Path], report: Report
) -> None:
    waiting = dict(slots)
    unexpected = []
    for path in files:
        for name, tensor in _tensors(path):
            if name not in slots and _BASE + name in slots:
                name = _BASE + name
            if name in waiting:
                _copy(waiting.pop(name), name, tensor, path)
                report("weights", len(slots) - len(waiting), len(slots))
            elif name in slots:
                raise _corrupt(path, f"tensor {name} stands in a second file too")
            elif not model.ignores(name):
                unexpected.append(name)
    if waiting:
        raise _mismatch(f"{len(waiting)} tensors are missing", sorted(waiting), model)
    if unexpected:
        raise _mismatch(f"{len(unexpected)} tensors are unknown", sorted(unexpected), model)


def _tensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of one file, each mapped from disk only while it is copied."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            for name in file.keys():  # noqa: SIM118 - the file object is no mapping
                yield name, file.get_tensor(name)
    except (SafetensorError, OSError) as error:
        with path.open("rb") as raw:
            pointer = raw.read(len(_LFS_POINTER)) == _LFS_POINTER
        reason = "it is a Git LFS pointer: run `git lfs pull`" if pointer else str(error)
        raise _corrupt(path, reason) from error


def _copy(slot: torch.Tensor, name: str, tensor: torch.Tensor, path: Path) -> None:
    if tensor.shape != slot.shape:
        raise InvalidRequest(
            f"{path.name}: tensor {name} has shape {list(tensor.shape)} where config.json implies "
            f"{list(slot.shape)}: config.json and weights are not of the same model",
            reason="SHAPE_MISMATCH",
            param="model",
        )
    if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        raise Unsupported(
            f"{path.name}: tensor {name} has number format {tensor.dtype}, and quantized weights "
            "are not supported by this build",
            reason="TRAIT_UNSUPPORTED",
            param="model",
        )
    slot.copy_(tensor)


def _fill_random(slots: dict[str, torch.Tensor], seed: int, report: Report) -> None:
    """Normal weights that keep activations near 1; each depends only on seed and tensor name."""
    for done, (name, slot) in enumerate(slots.items(), start=1):
        generator = torch.Generator(device=slot.device)
        digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
        generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        if name.lower().endswith("norm.weight"):
            slot.fill_(1.0)
        elif slot.ndim == 2 and "embed" not in name:
            slot.normal_(0.0, slot.shape[1] ** -0.5, generator=generator)
        else:
            slot.normal_(0.0, _DUMMY_EMBEDDING_STD, generator=generator)
        report("weights", done, len(slots))


def _corrupt(path: Path, reason: str) -> ServiceError:
    return InvalidRequest(
        f"{path} cannot be read as weights ({reason}; {path.stat().st_size} bytes): it is corrupt "
        "or truncated, fetch the file again",
        reason="CHECKPOINT_CORRUPT",
        param="model",
    )


def _mismatch(what: str, names: list[str], model: CausalModel) -> ServiceError:
    shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
    return InvalidRequest(
        f"{what} for {model.traits.architecture}: {shown}; the weights do not belong to this "
        "config.json",
        reason="TENSOR_MISMATCH",
        param="model",
    )

"""Builds a model and fills its parameters, tensor by tensor, without a second copy in memory.

It does not know which model it loads: names and views come from `CausalModel.weight_slots`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

import torch

from engine_service.config import EngineConfig
from engine_service.defaults import sampling_defaults
from engine_service.distributed import ALONE, Group
from engine_service.layers.slots import Slot, Slots
from engine_service.models.base import REGISTRY, CausalModel, ModelTraits
from engine_service.models.hf_config import eot_token_ids, token_ids
from engine_service.worker.checkpoint import Checkpoint, Report
from engine_service.worker.files import Stored, corrupt, reading, survey, weight_files
from engine_service.worker.shards import held, of_stage, rank_file
from tidemill.runtime.errors import InvalidRequest, ServiceError, Unsupported

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_FILE_FORMATS = frozenset({"F64", "F32", "F16", "BF16"})
"""As safetensors calls them."""
_READERS = 4
"""Threads that read weights; each holds no more memory than the tensor that it copies."""
_BASE = "model."
"""Ahead of the names of a decoder that was saved with its head; embedding models are saved bare."""
_DUMMY_EMBEDDING_STD = 0.02


def read_traits(checkpoint: Checkpoint) -> ModelTraits:
    """Traits of the checkpoint; raises Unsupported for an unknown architecture or trait.

    Stop tokens of generation_config.json are added to those of config.json. Ids that the vocabulary
    does not have are left out: nothing ever is one, and whoever suppresses them would write to
    logits that are not there.
    """
    kind = REGISTRY.find(checkpoint.hf_config)
    traits = kind.read_traits(checkpoint.hf_config, checkpoint.added_tokens)
    more = token_ids(checkpoint.generation_config.get("eos_token_id"))
    named = dict.fromkeys((*traits.eos_token_ids, *more))
    stops = tuple(one for one in named if 0 <= one < traits.vocab_size)
    turns = eot_token_ids(checkpoint.added_tokens, traits.vocab_size) or traits.eot_token_ids
    return dataclasses.replace(traits, eos_token_ids=stops, eot_token_ids=turns)


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


def check_files(config: EngineConfig, checkpoint: Checkpoint, group: Group = ALONE) -> None:
    """Refuses files that are missing or not whole, and defaults that no request may have, before
    anything else is done with them."""
    sampling_defaults(config, checkpoint.generation_config)
    if config.load_format != "dummy":
        survey(_files(checkpoint, group))


def _files(checkpoint: Checkpoint, group: Group) -> list[Path]:
    """What this rank reads from."""
    if checkpoint.manifest is None:
        return weight_files(checkpoint.folder)
    return [rank_file(checkpoint.folder, checkpoint.manifest, group)]


def load_model(
    config: EngineConfig,
    checkpoint: Checkpoint,
    *,
    device: torch.device,
    dtype: torch.dtype,
    report: Report,
    group: Group = ALONE,
) -> CausalModel:
    """A model ready for inference, or this rank's share of it, of which alone it reads the bytes.
    `report("weights", done, total)` counts tensors.

    Raises InvalidRequest, NotFound or Unsupported naming the file or tensor at fault.
    """
    kind = REGISTRY.find(checkpoint.hf_config)
    traits = read_traits(checkpoint)
    model = kind.create(traits, checkpoint.hf_config, device=device, dtype=dtype, group=group)
    slots = model.weight_slots()
    with torch.no_grad():
        if config.load_format == "dummy":
            _fill_random(slots, config.seed, report)
        else:
            stored = survey(_files(checkpoint, group))
            wanted = slots
            if checkpoint.manifest is not None:
                wanted, stored = held(slots), of_stage(slots, stored)
            _read(match(model, wanted, stored), report)
        model.after_load()
    return model.eval()


class Part(NamedTuple):
    """A tensor to be read: its name in the file, where that is, and what takes it."""

    name: str
    slot_name: str
    stored: Stored
    slot: Slot


def match(model: CausalModel, slots: Slots, stored: dict[str, Stored]) -> list[Part]:
    """What is to be read, in the order of the files; raises what does not fit."""
    waiting, parts, unexpected = dict(slots), [], []
    for own_name, found in stored.items():
        name = own_name
        if name not in slots and _BASE + name in slots:
            name = _BASE + name
        if name in waiting:
            slot = waiting.pop(name)
            _check(name, found, slot)
            parts.append(Part(own_name, name, found, slot))
        elif name in slots:
            raise corrupt(found.path, f"tensor {name} stands in it under two names")
        elif not model.ignores(name):
            unexpected.append(name)
    if waiting:
        raise _mismatch(f"{len(waiting)} tensors are missing", sorted(waiting), model)
    if unexpected:
        raise _mismatch(f"{len(unexpected)} tensors are unknown", sorted(unexpected), model)
    return parts


def _check(name: str, stored: Stored, slot: Slot) -> None:
    if stored.shape != slot.shape:
        raise InvalidRequest(
            f"{stored.path.name}: tensor {name} has shape {list(stored.shape)} where config.json "
            f"implies {list(slot.shape)}: config.json and weights are not of the same model",
            reason="SHAPE_MISMATCH",
            param="model",
        )
    if stored.number_format not in _FILE_FORMATS:
        raise Unsupported(
            f"{stored.path.name}: tensor {name} has number format {stored.number_format}, and "
            "quantized weights are not supported by this build",
            reason="TRAIT_UNSUPPORTED",
            param="model",
        )


def _read(parts: list[Part], report: Report) -> None:
    """By several threads, each with a run of one file's tensors: a disk, above all one behind a
    network, answers many readers faster than one, and torch copies without the interpreter."""
    jobs = _jobs(parts)
    told: SimpleQueue[BaseException | None] = SimpleQueue()
    given_up = threading.Event()

    def read(job: list[Part]) -> None:
        try:
            with reading(job[0].stored.path) as file, torch.no_grad():
                for part in job:
                    if given_up.is_set():
                        return
                    tensor = file.get_slice(part.name)
                    for view, where in part.slot.pieces:
                        view.copy_(tensor[where or ...])
                    told.put(None)
        except BaseException as failure:
            told.put(failure)

    with ThreadPoolExecutor(_READERS, "weights") as pool:
        for job in jobs:
            pool.submit(read, job)
        for done in range(1, len(parts) + 1):
            if (failure := told.get()) is not None:
                given_up.set()
                raise failure
            report("weights", done, len(parts))


def _jobs(parts: list[Part]) -> list[list[Part]]:
    """One for a file, or several where there are fewer files than readers."""
    files: dict[Path, list[Part]] = {}
    for part in parts:
        files.setdefault(part.stored.path, []).append(part)
    jobs = []
    for own in files.values():
        size = -(-len(own) // -(-_READERS // len(files)))
        jobs += [own[at : at + size] for at in range(0, len(own), size)]
    return jobs


def _fill_random(slots: Slots, seed: int, report: Report) -> None:
    """Normal weights that keep activations near 1; each depends only on seed and tensor name, and
    is drawn whole, so that any number of ranks holds the same model."""
    for done, (name, slot) in enumerate(slots.items(), start=1):
        for view, where in slot.pieces:
            # Numbers are drawn in the order of memory: a view with another order gets copies.
            fits = view.shape == slot.shape and view.is_contiguous()
            whole = view if fits else view.new_empty(slot.shape)
            _draw(whole, name, seed)
            if not fits:
                view.copy_(whole[where or ...])
        report("weights", done, len(slots))


def _draw(whole: torch.Tensor, name: str, seed: int) -> None:
    generator = torch.Generator(device=whole.device)
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    if name.lower().endswith("norm.weight"):
        whole.fill_(1.0)
    elif whole.ndim == 2 and "embed" not in name:
        whole.normal_(0.0, whole.shape[1] ** -0.5, generator=generator)
    else:
        whole.normal_(0.0, _DUMMY_EMBEDDING_STD, generator=generator)


def _mismatch(what: str, names: list[str], model: CausalModel) -> ServiceError:
    shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
    return InvalidRequest(
        f"{what} for {model.traits.architecture}: {shown}; the weights do not belong to this "
        "config.json",
        reason="TENSOR_MISMATCH",
        param="model",
    )

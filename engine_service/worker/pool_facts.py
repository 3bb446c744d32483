"""How a checkpoint's embeddings are made: the files that sentence-transformers writes beside it.

It does not know weights; without those files the architecture's own way is taken.
"""

from __future__ import annotations

from typing import Any

from engine_service.core.params import PoolFacts
from engine_service.models.base import ModelTraits
from engine_service.worker.checkpoint import Checkpoint
from engine_service.worker.json_files import read_json, read_json_list

_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}
_SPELLINGS = {
    "cls": "pooling_mode_cls_token",
    "mean": "pooling_mode_mean_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}
"""What sentence-transformers writes from 5.4 on, and what it wrote before."""
_MODULES = ("Transformer", "Pooling", "Normalize")


def read_pool_facts(checkpoint: Checkpoint, traits: ModelTraits) -> PoolFacts:
    """`refusal` says what this build does not compute; nothing of it stops a model that generates.

    Reads modules.json and the config.json of its Pooling.
    """
    modules = read_json_list(checkpoint.folder / "modules.json")
    kinds = [str(module.get("type", "")).rsplit(".", 1)[-1] for module in modules]
    unknown = [kind for kind in kinds if kind not in _MODULES]
    pooling: dict[str, Any] = {}
    for module, kind in zip(modules, kinds, strict=True):
        if kind == "Pooling":
            folder = checkpoint.folder / str(module.get("path", "1_Pooling"))
            pooling = read_json(folder / "config.json") or {}
    modes = [name for name, value in pooling.items() if name.startswith("pooling_mode_") and value]
    written = pooling.get("pooling_mode") or []
    listed = [written] if isinstance(written, str) else written
    modes += [_SPELLINGS.get(str(name), f"pooling_mode {name}") for name in listed]
    modes = list(dict.fromkeys(modes))
    unknown += [name for name in modes if name not in _MODES] or modes[1:]
    refusal = ""
    if unknown:
        refusal = (
            f"the embeddings of {checkpoint.model_id} go through {', '.join(unknown)}, which this "
            f"build does not compute (it knows {', '.join((*_MODULES, *_MODES))})"
        )
    elif traits.routes_by_block:
        refusal = (
            f"{checkpoint.model_id} chooses experts for whole blocks (expert_capacity), and texts "
            "end inside of blocks: their embeddings would depend on what is computed beside them"
        )
    return PoolFacts(
        architecture=traits.architecture,
        dimensions=traits.hidden_size,
        kind=_MODES[modes[0]] if modes and not unknown else traits.pooling,
        num_labels=traits.num_labels,
        num_segments=traits.num_segments,
        refusal=refusal,
    )

"""Whether ranks are about to load the same thing, asked before any of them loads it: minutes later
all that they have read would be thrown away. It does not know where ranks are.
"""

from __future__ import annotations

from typing import Any

import torch

from engine_service.distributed import Group
from engine_service.models.base import ModelTraits
from engine_service.resolve import ResolvedConfig
from engine_service.worker.checkpoint import Checkpoint
from tidemill.runtime.errors import FailedPrecondition

_TOKENS = "; it is read from generation_config.json and the tokenizer's files: copy these too"
_REMEDIES = {
    "eos_token_ids": _TOKENS,
    "eot_token_ids": _TOKENS,
    "mask_token_id": _TOKENS,
    "weight_version": "; that of a local folder counts the times of its files: copy it with them"
    " (cp -p, rsync -a)",
    "dtype": "; auto goes by the GPU: pass one that all of them have (--dtype float16)",
}


def check_alike(
    group: Group,
    checkpoint: Checkpoint,
    traits: ModelTraits,
    resolved: ResolvedConfig,
    dtype: torch.dtype,
) -> None:
    """Every rank of every stage must call it. Raises FailedPrecondition, on all of them, naming the
    first rank that has something else than rank 0, with both values."""
    own: dict[str, Any] = {
        "weight_version": checkpoint.weight_version,
        "dtype": str(dtype).removeprefix("torch."),
        "max_model_len": resolved.max_model_len,
        "max_rows": resolved.max_rows,
        "page_size": resolved.page_size,
        # Every rank chooses tokens for itself.
        "eos_token_ids": traits.eos_token_ids,
        "eot_token_ids": traits.eot_token_ids,
        "mask_token_id": traits.mask_token_id,
    }
    first, *others = group.all_of(own)
    for rank, theirs in enumerate(others, 1):
        for name, value in theirs.items():
            if value != first[name]:
                raise FailedPrecondition(
                    f"rank {rank} has {name} {value!r}, rank 0 {first[name]!r}: all ranks need the "
                    "same files, devices and versions" + _REMEDIES.get(name, ""),
                    reason="RANKS_DIFFER",
                )

"""Memory that runs out: what an operator is told to change.

It does not know what was computed; whoever ran out says in which stage.
"""

from __future__ import annotations

import torch

from engine_service.core.step import StepPlan
from engine_service.distributed import Group
from engine_service.models.base import REGISTRY, ModelTraits
from engine_service.resolve import ResolvedConfig
from engine_service.worker.checkpoint import Checkpoint
from tidemill.runtime.errors import EngineDead, InvalidRequest

_GIB = 1 << 30


def start_up_shortage(advice: str, device: torch.device, free: int) -> InvalidRequest:
    """The end of a start-up: `free` bytes were left on `device` when the stage began."""
    return InvalidRequest(
        f"out of memory on {device}, of which {gibibytes(free)} were free: {advice}",
        reason="OUT_OF_MEMORY",
        facts={"free_bytes": str(free)},
    )


def step_shortage(plan: StepPlan, resolved: ResolvedConfig) -> EngineDead:
    """The end of an engine in a step."""
    tokens = sum(span.num_tokens for span in plan.spans)
    return EngineDead(
        f"out of memory in a step of {plan.num_spans} rows and {tokens} tokens: end what else"
        " uses the device's memory, or start with less --memory-fraction,"
        f" --token-budget (now {resolved.token_budget}), --logit-budget (now"
        f" {resolved.logit_budget}) or --max-rows (now {resolved.max_rows})"
    )


def weights_advice(
    checkpoint: Checkpoint, traits: ModelTraits, dtype: torch.dtype, group: Group
) -> str:
    """How large the weights of one rank are; needs no memory for them."""
    kind = REGISTRY.find(checkpoint.hf_config)
    nowhere = torch.device("meta")
    model = kind.create(traits, checkpoint.hf_config, device=nowhere, dtype=dtype, group=group)
    size = sum(slot.nbytes for slot in model.weight_slots().values())
    half = "--dtype bfloat16 (half of that), " if dtype is torch.float32 else ""
    return (
        f"the weights of {checkpoint.model_id} take {gibibytes(size)} ({size} bytes) in"
        f" {str(dtype).removeprefix('torch.')}: pass {half}a smaller model, or a --device with more"
        " memory (--memory-fraction changes nothing here)"
    )


def profile_advice(resolved: ResolvedConfig) -> str:
    """The largest step that the budgets allow does not fit beside the weights."""
    return (
        f"a step of {resolved.token_budget} tokens and {resolved.logit_chunk} rows of logits does"
        f" not fit beside the weights: pass less --token-budget (now {resolved.token_budget}),"
        f" --logit-budget (now {resolved.logit_budget}) or --max-rows (now {resolved.max_rows})"
    )


def pool_advice(resolved: ResolvedConfig) -> str:
    """The KV pool, or the tables of its rows, is larger than what is left."""
    return (
        "the KV pool and the tables do not fit: pass less --num-pages, --memory-fraction,"
        f" --max-rows (now {resolved.max_rows}) or --max-model-len (now {resolved.max_model_len})"
    )


def graphs_advice() -> str:
    """Of several ranks none can do without its graphs alone."""
    return (
        "the CUDA graphs of this rank do not fit: pass less --memory-fraction, --num-pages or"
        " --max-rows, or --enforce-eager, with which no rank has any"
    )


def gibibytes(size: int) -> str:
    """A size in bytes for a reader."""
    return f"{size / _GIB:.2f} GiB"

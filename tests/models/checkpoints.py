"""Tiny checkpoints with random weights, written by transformers, and the cases to test."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from engine_service.config import EngineConfig
from engine_service.models.base import CausalModel
from engine_service.worker.checkpoint import fetch_checkpoint
from engine_service.worker.weights import load_model

SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}

Edit = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One architecture with one set of options; `edit` changes the written config.json."""

    name: str
    kind: str
    options: dict[str, Any] = field(default_factory=dict)
    edit: Edit | None = None
    shards: bool = False


def before_version_5(config: dict[str, Any]) -> None:
    """Rewrites `rope_parameters` as `rope_theta` and `rope_scaling` with `type`."""
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    kind = rope.pop("rope_type")
    config["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
    config["torch_dtype"] = config.pop("dtype")


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
FEW_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
LINEAR = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0}

CASES = [
    Case(name="llama", kind="Llama"),
    Case(name="llama-old", kind="Llama", edit=before_version_5, shards=True),
    Case(name="llama-bias-head", kind="Llama", options={"attention_bias": True, "head_dim": 24}),
    Case(name="llama-mlp-bias", kind="Llama", options={"mlp_bias": True}),
    Case(name="llama3", kind="Llama", options={"rope_parameters": LLAMA3}),
    Case(
        name="llama3-old", kind="Llama", options={"rope_parameters": LLAMA3}, edit=before_version_5
    ),
    Case(name="llama-yarn", kind="Llama", options={"rope_parameters": YARN}),
    Case(
        name="llama-yarn-mscale",
        kind="Llama",
        options={
            "rope_parameters": YARN
            | {"mscale": 1.2, "mscale_all_dim": 0.7, "beta_fast": 16.0, "truncate": False}
        },
        edit=before_version_5,
    ),
    Case(
        name="llama-yarn-factor",
        kind="Llama",
        options={"rope_parameters": YARN | {"attention_factor": 0.8}},
    ),
    Case(name="llama-linear", kind="Llama", options={"rope_parameters": LINEAR}),
    Case(name="llama-mha", kind="Llama", options={"num_key_value_heads": 4}),
    Case(name="mistral", kind="Mistral", options={"sliding_window": 11}, shards=True),
    Case(name="mistral-full", kind="Mistral", options={"sliding_window": None, "head_dim": 32}),
    Case(name="qwen2", kind="Qwen2"),
    Case(name="qwen2-old", kind="Qwen2", edit=before_version_5),
    Case(
        name="qwen2-window",
        kind="Qwen2",
        options={"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    ),
    Case(name="qwen3", kind="Qwen3", options={"head_dim": 32}, shards=True),
    Case(
        name="qwen3-tied",
        kind="Qwen3",
        options={"head_dim": 32, "tie_word_embeddings": True},
        edit=before_version_5,
    ),
    Case(
        name="qwen3-window",
        kind="Qwen3",
        options={
            "head_dim": 16,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    Case(
        name="qwen3-moe",
        kind="Qwen3Moe",
        options=FEW_EXPERTS | {"head_dim": 32, "norm_topk_prob": True},
        shards=True,
    ),
    Case(
        name="qwen3-moe-mixed",
        kind="Qwen3Moe",
        options=FEW_EXPERTS
        | {
            "attention_bias": True,
            "num_hidden_layers": 5,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "use_sliding_window": True,
            "sliding_window": 9,
        },
        edit=before_version_5,
    ),
    Case(name="mixtral", kind="Mixtral", options={"num_local_experts": 5}, shards=True),
    Case(
        name="mixtral-window",
        kind="Mixtral",
        options={"sliding_window": 11, "num_experts_per_tok": 3, "head_dim": 32},
        edit=before_version_5,
    ),
]


def write(case: Case, folder: Path, seed: int) -> transformers.PreTrainedModel:
    """Saves the case's checkpoint and returns transformers' model of it, in float32."""
    torch.manual_seed(seed)
    config_kind = getattr(transformers, f"{case.kind}Config")
    model_kind = getattr(transformers, f"{case.kind}ForCausalLM")
    model = model_kind(config_kind(**SIZES | case.options)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.normal_(1.0, 0.3)
            elif parameter.ndim == 1:
                parameter.normal_(0.0, 0.5)
            else:
                # Twenty times the usual scale: greedy choices are clear, positions matter.
                parameter.normal_(0.0, 0.4)
    model.save_pretrained(folder, max_shard_size="40KB" if case.shards else "1GB")
    assert case.shards == (folder / "model.safetensors.index.json").exists()
    if case.edit is not None:
        path = folder / "config.json"
        config = json.loads(path.read_text())
        case.edit(config)
        path.write_text(json.dumps(config))
    return model


def load(folder: Path, dtype: torch.dtype = torch.float32, **config: Any) -> CausalModel:
    """Our model of a folder, on the CPU."""
    settings = EngineConfig(model=str(folder), **config)
    checkpoint = fetch_checkpoint(settings, lambda *_: None)
    return load_model(
        settings, checkpoint, device=torch.device("cpu"), dtype=dtype, report=lambda *_: None
    )

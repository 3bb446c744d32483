"""Small config.json files of every architecture that generates, for models of random weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.equivalence.test_worker_canvas import LLADA as _LLADA
from tests.models.checkpoints import SIZES
from tests.models.test_bailing_moe_v2 import CONFIG as LING
from tests.models.test_experts_with_masks import CONFIG as LLADA_MOE
from tests.models.test_llada2_moe import CONFIG as LLADA2

VOCAB, MASK = SIZES["vocab_size"], 319
GREEDY, DRAWN = {"temperature": 0.0}, {"temperature": 0.9, "seed": 7}
FILTERED = {"temperature": 1.1, "seed": 5, "top_k": 20, "top_p": 0.9, "min_p": 0.01}
PENALISED = {"temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": 0.4}


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A config.json, and what requests are made of it."""

    config: dict[str, Any]
    knobs: dict[str, Any] = field(default_factory=dict)
    sampling: tuple[dict[str, Any], ...] = (GREEDY, DRAWN)
    sizes: tuple[int, ...] = (2, 4)
    """Numbers of ranks that can share it."""


def _qwen(architecture: str, model_type: str, **changes: Any) -> dict[str, Any]:
    return {
        **SIZES,
        "architectures": [architecture],
        "model_type": model_type,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "dtype": "float32",
        **changes,
    }


_EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "norm_topk_prob": True,
}
_CANVAS = {"block_length": 8, "steps": 8}
_SPARSE = {"cache": "sparse", "retention_ratio": 0.5}
_BLOCK = {"block_size": 8, "mask_token_id": MASK}

SHAPES = {
    "qwen3": Shape(
        config=_qwen("Qwen3ForCausalLM", "qwen3"),
        sampling=(GREEDY, DRAWN, FILTERED, PENALISED),
    ),
    "qwen3-tied": Shape(
        config=_qwen("Qwen3ForCausalLM", "qwen3", tie_word_embeddings=True, vocab_size=317)
    ),
    "qwen2": Shape(config=_qwen("Qwen2ForCausalLM", "qwen2")),
    "llama-biases": Shape(
        config=_qwen("LlamaForCausalLM", "llama", attention_bias=True, mlp_bias=True)
    ),
    "mistral": Shape(config=_qwen("MistralForCausalLM", "mistral", sliding_window=11)),
    "qwen3-moe": Shape(config=_qwen("Qwen3MoeForCausalLM", "qwen3_moe", **_EXPERTS)),
    "mixtral": Shape(config=_qwen("MixtralForCausalLM", "mixtral", num_local_experts=5)),
    "bailing-moe-v2": Shape(config=LING | {"vocab_size": VOCAB}),
    "sdar": Shape(config=_qwen("SDARForCausalLM", "sdar", **_BLOCK)),
    "sdar-moe": Shape(config=_qwen("SDARMoeForCausalLM", "sdar_moe", **_BLOCK, **_EXPERTS)),
    "fast-dllm": Shape(
        config=_qwen("Fast_dLLM_QwenForCausalLM", "Fast_dLLM_Qwen", bd_size=8, mask_token_id=MASK)
    ),
    "llada": Shape(config=_LLADA, knobs=_CANVAS),
    "llada-dual": Shape(config=_LLADA, knobs=_CANVAS | {"cache": "dual"}, sampling=(GREEDY,)),
    "llada-sparse": Shape(config=_LLADA, knobs=_CANVAS | _SPARSE, sampling=(GREEDY,)),
    "llada-sparse-heads": Shape(
        config=_LLADA, knobs=_CANVAS | _SPARSE | {"head_select": True}, sampling=(GREEDY,)
    ),
    "llada-guided": Shape(config=_LLADA, knobs=_CANVAS | {"cfg_scale": 1.5}, sampling=(GREEDY,)),
    "llada-moe": Shape(
        config=LLADA_MOE | {"vocab_size": VOCAB, "mask_token_id": MASK, "model_type": "llada"},
        knobs=_CANVAS,
    ),
    "llada2-moe": Shape(config=LLADA2 | {"vocab_size": VOCAB, "mask_token_id": MASK}),
    "dream": Shape(
        config=_qwen("DreamModel", "Dream", mask_token_id=MASK, num_key_value_heads=4),
        knobs={"steps": 8},
    ),
}

"""Model shapes that are measured with random weights: what config.json says, and nothing more.

It does not know engines: it writes the folder that `--load-format dummy` (or a peer) reads.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tidemill.runtime.errors import InvalidRequest, NotFound

_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def _qwen3(
    hidden_size: int, intermediate_size: int, layers: int, heads: int, *, tied: bool
) -> dict[str, Any]:
    return _QWEN3 | {
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "tie_word_embeddings": tied,
    }


_SDAR = {"architectures": ["SDARForCausalLM"], "model_type": "sdar", "mask_token_id": 151669}
_QWEN3_8B = _qwen3(4096, 12288, 36, 32, tied=False)
_LLADA_8B: dict[str, Any] = {
    "architectures": ["LLaDAModelLM"],
    "model_type": "llada",
    "d_model": 4096,
    "embedding_size": 126464,
    "eos_token_id": 126081,
    "layer_norm_type": "rms",
    "mask_token_id": 126336,
    "max_sequence_length": 4096,
    "mlp_hidden_size": 12288,
    "n_heads": 32,
    "n_kv_heads": 32,
    "n_layers": 32,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "vocab_size": 126464,
    "weight_tying": False,
}
_OF_BLOCKS = ("block_length", "mask_token_id")
_LLADA2_MINI: dict[str, Any] = {
    "architectures": ["LLaDA2MoeModelLM"],
    "model_type": "llada2_moe",
    "block_length": 32,
    "eos_token_id": 156892,
    "first_k_dense_replace": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "mask_token_id": 156895,
    "max_position_embeddings": 8192,
    "moe_intermediate_size": 512,
    "n_group": 8,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 20,
    "num_key_value_heads": 4,
    "num_shared_experts": 1,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-6,
    "rope_theta": 600000,
    "routed_scaling_factor": 2.5,
    "tie_word_embeddings": False,
    "topk_group": 4,
    "torch_dtype": "bfloat16",
    "vocab_size": 157184,
}
_LING_MINI = {key: value for key, value in _LLADA2_MINI.items() if key not in _OF_BLOCKS} | {
    "architectures": ["BailingMoeV2ForCausalLM"],
    "model_type": "bailing_moe",
    "max_position_embeddings": 32768,
}
"""LLaDA2-mini was made from Ling-mini-2.0: the decoder is the same."""

SHAPES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, tied=True),
        "qwen3-8b": _QWEN3_8B,
        "qwen3-32b": _qwen3(5120, 25600, 64, 64, tied=False),
        "sdar-8b": _QWEN3_8B | _SDAR | {"block_size": 4},
        "llada-8b": _LLADA_8B,
        "llada2-mini": _LLADA2_MINI,
        "ling-mini": _LING_MINI,
    }
)
"""config.json of the published models of these names."""


def read_shape(shape: str) -> dict[str, Any]:
    """The config of a known shape, or of a config.json (or its folder) at this path.

    Raises NotFound, or InvalidRequest for a file that holds no JSON object.
    """
    if shape in SHAPES:
        return dict(SHAPES[shape])
    path = Path(shape).expanduser()
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise NotFound(
            f"shape {shape!r} is neither known ({', '.join(SHAPES)}) nor a config.json",
            param="shape",
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidRequest(f"{path} is not valid JSON: {error}", param="shape") from error
    if not isinstance(config, dict):
        raise InvalidRequest(f"{path} must hold a JSON object", param="shape")
    return config


@contextmanager
def shape_folder(shape: str) -> Iterator[Path]:
    """A temporary model folder of that shape: config.json and generation_config.json, no weights.

    Raises what `read_shape` raises.
    """
    config = read_shape(shape)
    special = {name: config.get(name) for name in ("bos_token_id", "eos_token_id")}
    generation = {name: token for name, token in special.items() if token is not None}
    with tempfile.TemporaryDirectory(prefix="tidemill-shape-") as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "generation_config.json").write_text(json.dumps(generation))
        yield folder

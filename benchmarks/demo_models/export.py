"""Writes a trained model as an ordinary Hugging Face folder; knows nothing about training."""

import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from benchmarks.demo_models.corpus import BLOCK_SIZE
from benchmarks.demo_models.model import DemoLM, Shape
from benchmarks.demo_models.vocabulary import (
    EOS,
    MASK,
    PAD,
    decode,
    encode,
    tokenizer_config,
    tokenizer_json,
    write_json,
)

MAX_BYTES = 5_000_000
"""Largest weight file that may be packaged."""


def autoregressive_config(shape: Shape) -> dict[str, object]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "dtype": "bfloat16",
        "eos_token_id": EOS,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": shape.intermediate_size,
        "max_position_embeddings": shape.max_positions,
        "num_attention_heads": shape.num_heads,
        "num_hidden_layers": shape.num_layers,
        "num_key_value_heads": shape.num_kv_heads,
        "pad_token_id": PAD,
        "rms_norm_eps": shape.rms_eps,
        "rope_theta": shape.rope_theta,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": shape.vocab_size,
    }


def block_config(shape: Shape) -> dict[str, object]:
    return {
        **autoregressive_config(shape),
        "architectures": ["SDARForCausalLM"],
        "model_type": "sdar",
        "block_size": BLOCK_SIZE,
        "mask_token_id": MASK,
    }


def canvas_config(shape: Shape) -> dict[str, object]:
    """LLaDA's own keys."""
    return {
        "architectures": ["LLaDAModelLM"],
        "model_type": "llada",
        "activation_type": "silu",
        "block_type": "llama",
        "d_model": shape.hidden_size,
        "dtype": "bfloat16",
        "embedding_size": shape.vocab_size,
        "eos_token_id": EOS,
        "include_bias": False,
        "layer_norm_type": "rms",
        "mask_token_id": MASK,
        "max_sequence_length": shape.max_positions,
        "mlp_hidden_size": shape.intermediate_size,
        "n_heads": shape.num_heads,
        "n_kv_heads": shape.num_kv_heads,
        "n_layers": shape.num_layers,
        "pad_token_id": PAD,
        "rms_norm_eps": shape.rms_eps,
        "rope": True,
        "rope_theta": shape.rope_theta,
        "vocab_size": shape.vocab_size,
        "weight_tying": True,
    }


_LLADA_NAMES = {
    "model.embed_tokens.": "model.transformer.wte.",
    "model.norm.": "model.transformer.ln_f.",
    "model.layers.": "model.transformer.blocks.",
    ".input_layernorm.": ".attn_norm.",
    ".self_attn.o_proj.": ".attn_out.",
    ".self_attn.": ".",
    ".post_attention_layernorm.": ".ff_norm.",
    ".mlp.gate_proj.": ".ff_proj.",
    ".mlp.down_proj.": ".ff_out.",
    ".mlp.": ".",
}


def llada_name(name: str) -> str:
    """A tensor's name in a LLaDA checkpoint."""
    for ours, theirs in _LLADA_NAMES.items():
        name = name.replace(ours, theirs)
    return name


def rounded_weights(model: DemoLM) -> dict[str, torch.Tensor]:
    """The weights as they are shipped; the tied output head is not stored twice."""
    return {
        name: tensor.detach().to("cpu", torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
    }


def check_tokenizer(folder: Path) -> None:
    """The file on disk must encode as the training rows were encoded. Raises ValueError if not."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = "add: 1+2 = 3\n\tÄ 漢字 🙂 \x00"
    ids = tokenizer.encode(text).ids
    if ids != encode(text) or tokenizer.decode(ids) != text or decode(ids) != text:
        raise ValueError(f"{folder}: the tokenizer file does not map bytes to ids 0 to 255")


def write_folder(
    folder: Path,
    model: DemoLM,
    config: dict[str, object],
    *,
    rename: Callable[[str], str] = str,
) -> None:
    """Replaces `folder`; `rename` gives the checkpoint's name of a tensor.

    Raises ValueError if the weights are too large to package.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    weights = folder / "model.safetensors"
    named = {rename(name): tensor for name, tensor in rounded_weights(model).items()}
    save_file(named, weights, metadata={"format": "pt"})
    weights.chmod(0o644)
    write_json(folder / "config.json", config)
    write_json(
        folder / "generation_config.json",
        {"do_sample": False, "eos_token_id": EOS, "pad_token_id": PAD},
    )
    write_json(folder / "tokenizer.json", tokenizer_json())
    write_json(folder / "tokenizer_config.json", tokenizer_config(model.shape.max_positions))
    check_tokenizer(folder)
    if weights.stat().st_size > MAX_BYTES:
        raise ValueError(f"{folder}: the weights exceed {MAX_BYTES} bytes")

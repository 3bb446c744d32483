"""Tiny checkpoints of BERT's shape with random weights, and a tokenizer for them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

SIZES = {
    "vocab_size": 120,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


def write(folder: Path, kind: str, seed: int = 0, **options: Any) -> Any:
    """Saves a checkpoint with random weights and returns transformers' model of it."""
    torch.manual_seed(seed)
    family = re.split("Model|For", kind)[0]
    config = getattr(transformers, f"{family}Config")(**SIZES | options)
    model = getattr(transformers, kind)(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = name.endswith("LayerNorm.weight")
            parameter.normal_(float(is_norm), 0.3 if is_norm or parameter.ndim == 1 else 0.2)
    model.save_pretrained(folder)
    return model


def write_tokenizer(folder: Path) -> Tokenizer:
    """WordPiece over letters, with BERT's special tokens around one text or two."""
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *letters, *(f"##{one}" for one in letters)]
    vocab = {name: index for index, name in enumerate(names)}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(names[:4])
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"cls_token": "[CLS]", "sep_token": "[SEP]", "model_max_length": 64}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return tokenizer

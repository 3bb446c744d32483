"""SentencePiece models (tokenizer.model) as the tokenizers library reads them.

transformers converts; what it makes is compared with SentencePiece itself, because a model that
normalises in its own way would else get other tokens than it was trained on, and nobody would see.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tidemill.runtime.errors import FailedPrecondition
from tidemill.written import read_written

MODEL_FILE = "tokenizer.model"
_PLAIN = "LlamaTokenizer"
"""The class whose tokenizer does what the model file says, and nothing more."""
_GENERIC = ("", "PreTrainedTokenizer", "TokenizersBackend", "SentencePieceBackend")
_SAMPLES = (
    "Hello world, how are you?",
    "a  b   c\n\n\td\r\ne ",
    "naïve Größe, 東京の海 и вода 🌊",
    "def f(x):\n    return {'k': x[0] ** 2}\n",
    "１２３ ﬁne ½ Å 2026-11-22T05:00:00Z",  # noqa: RUF001 (letters that NFKC would change)
)
"""They do not begin with a space: whether that one is kept is the one thing that differs."""


def tokenizer_json(folder: Path) -> str:
    """tokenizer.json for `folder`, which has a tokenizer.model instead. Blocks for seconds.

    Raises FailedPrecondition, saying what to do, where libraries are missing, where the file cannot
    be read and where the conversion does not encode as SentencePiece does.
    """
    try:
        import sentencepiece
        import transformers
    except ModuleNotFoundError as missing:
        raise FailedPrecondition(
            f"{folder} has a {MODEL_FILE} and no tokenizer.json, and reading it needs "
            f"{missing.name}, which is not installed: pip install transformers sentencepiece, or "
            "put a tokenizer.json there",
            reason="TOKENIZER_MISSING",
        ) from missing
    name = _PLAIN
    try:
        name = _class_name(folder)
        exact = sentencepiece.SentencePieceProcessor(model_file=str(folder / MODEL_FILE))
        loaded = getattr(transformers, name).from_pretrained(str(folder), local_files_only=True)
        backend = _as_trained(loaded.backend_tokenizer, exact.serialized_model_proto())
    except Exception as failure:  # both libraries raise what their parsers raise
        raise FailedPrecondition(
            f"{folder / MODEL_FILE} cannot be converted as a {name}: "
            f"{type(failure).__name__}: {failure}; put a tokenizer.json beside it",
            reason="TOKENIZER_BROKEN",
        ) from failure
    _check(folder, exact.encode, lambda text: backend.encode(text, add_special_tokens=False).ids)
    return str(backend.to_str())


def _as_trained(backend: Any, model_file: bytes) -> Any:
    """The tokenizer with the model that the file has. The plain class makes merges of any file,
    which for a unigram model give the likeliest pieces often, and not always."""
    from sentencepiece import sentencepiece_model_pb2
    from tokenizers import models

    kinds: Any = sentencepiece_model_pb2
    file = kinds.ModelProto.FromString(model_file)
    trained = file.trainer_spec
    is_unigram = trained.model_type == kinds.TrainerSpec.UNIGRAM
    if is_unigram and isinstance(backend.model, models.BPE):
        scores = [(one.piece, one.score) for one in file.pieces]
        backend.model = models.Unigram(scores, trained.unk_id, trained.byte_fallback)
    return backend


def _class_name(folder: Path) -> str:
    """transformers' class for the folder: that of tokenizer_config.json, else the plain one."""
    path = folder / "tokenizer_config.json"
    settings = json.loads(read_written(path)) if path.is_file() else {}
    name = str(settings.get("tokenizer_class") or "").removesuffix("Fast")
    return _PLAIN if name in _GENERIC else name


def _check(
    folder: Path, expected: Callable[[str], Any], converted: Callable[[str], list[int]]
) -> None:
    for text in _SAMPLES:
        if converted(text) != list(expected(text)):
            raise FailedPrecondition(
                f"{folder / MODEL_FILE}: its conversion does not encode {text!r} as SentencePiece "
                "does; put a tokenizer.json beside it that does",
                reason="TOKENIZER_BROKEN",
            )

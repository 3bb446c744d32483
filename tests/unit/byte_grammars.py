"""Grammars over a vocabulary in which token i is byte i, and the obvious way to try a text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from engine_service.constraints.llguidance import LlGrammars
from engine_service.core.params import ConstraintSpec

EOS = 256


def byte_grammars(folder: Path, *specials: str) -> LlGrammars:
    """`specials` are tokens from 257 on. There are no merges, because where a grammar leaves no
    choice only the tokenizer's own way to write the text is allowed."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    rest = [byte for byte in range(256) if byte not in printable]
    names = [chr(b) if b in printable else chr(256 + rest.index(b)) for b in range(256)]
    raw = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(["<|eos|>", *specials])
    raw.save(str(folder / "tokenizer.json"))
    return LlGrammars(str(folder), vocab_size=EOS + 1 + len(specials), eos_token_ids=[EOS])


def accepts(grammars: LlGrammars, spec: ConstraintSpec, text: str | Sequence[int]) -> bool:
    """Whether an answer of exactly this text, or of these tokens, may be given: every one of them
    is in the mask where it comes, and the end behind the last one."""
    matcher = grammars.open(spec)
    for token in (*(text.encode() if isinstance(text, str) else text), EOS):
        if matcher.is_complete:
            return token == EOS
        (mask,) = grammars.masks([matcher])
        if matcher.failure or not mask[token >> 3] >> (token & 7) & 1:
            return False
        matcher.accept(token)
    return matcher.is_complete

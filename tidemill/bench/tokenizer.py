"""A tokenizer for model shapes that have none: every id of the vocabulary reads as a short word.

A shape has random weights and no tokenizer, but a frontend serves text: it decodes every token and
frames it as JSON. So that this costs what it costs with a real model, the vocabulary is byte-level,
like those of the models whose shapes are measured, and its words are as long as their tokens. It
does not know engines.
"""

from __future__ import annotations

import json
import string
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

_SPACE = "\u0120"
"""How byte-level vocabularies write a space."""
_CHARACTERS = [_SPACE, *map(chr, range(33, 127))]
_WORD_LETTERS = 4


def words(vocab_size: int) -> list[str]:
    """The names of all ids: the printable ASCII characters, then words of four letters.

    All names are distinct. Raises ValueError for a vocabulary without room for the characters or
    with more ids than there are words.
    """
    num_words = vocab_size - len(_CHARACTERS)
    if not 0 <= num_words <= len(string.ascii_lowercase) ** _WORD_LETTERS:
        raise ValueError(f"no synthetic tokenizer has {vocab_size} ids")
    return [*_CHARACTERS, *map(_word, range(num_words))]


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Writes tokenizer.json and tokenizer_config.json; raises what `words` raises.

    It has no merges: text is encoded character by character, non-ASCII characters are dropped.
    """
    vocab = {name: token_id for token_id, name in enumerate(words(vocab_size))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 1 << 30}))


def _word(number: int) -> str:
    """Base 26 in letters, behind a space: 0 is ` aaaa`."""
    letters = []
    for _ in range(_WORD_LETTERS):
        number, letter = divmod(number, len(string.ascii_lowercase))
        letters.append(string.ascii_lowercase[letter])
    return _SPACE + "".join(reversed(letters))

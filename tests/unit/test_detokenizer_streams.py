"""Streams of real vocabularies: any Unicode text, cut at every place, reads as its whole decodes.

test_detokenizer.py has the corners; here the vocabularies are trained, so that tokens begin and end
within characters.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from frontend.tokenizer import TextTokenizer

CORPUS = [
    "The sea is calm tonight. The tide is full, the moon lies fair upon the straits.",
    "naïve café, Größe, señor; Ёлка и вода; 東京の海、海と空。 한국어 바다",
    "🌊🌊 👩‍👩‍👧 🇫🇷 e\u0301 a\u0308 \u200d\u200b x\tx\n\n  y   z",
] * 8
TEXTS = st.text(
    st.one_of(
        st.characters(exclude_categories=("Cs",)),
        st.sampled_from([*"the sea 東京海🌊éü \n\t", "\u200d", "\u0301", "\U0010ffff"]),
    ),
    max_size=24,
)


def byte_level() -> Tokenizer:
    """GPT-2, Llama 3, Qwen."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    raw.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    )
    return raw


def _decoder() -> decoders.Decoder:
    return decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )


def _normalizer() -> normalizers.Normalizer:
    return normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])


def fallback_bpe() -> Tokenizer:
    """Llama 2, Mistral, Gemma: SentencePiece's BPE with a token for every byte."""
    trained = Tokenizer(models.BPE())
    trained.normalizer = _normalizer()
    specials = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=specials, limit_alphabet=40, show_progress=False
    )
    trained.train_from_iterator(CORPUS, trainer)
    layout = trained.get_vocab()
    raw = Tokenizer(models.BPE(vocab=layout, merges=[], byte_fallback=True, fuse_unk=True))
    raw.normalizer, raw.decoder = _normalizer(), _decoder()
    return raw


def fallback_unigram() -> Tokenizer:
    """T5's kind of SentencePiece, with a token for every byte."""
    pieces = [("<unk>", 0.0), *((f"<0x{byte:02X}>", -9.0) for byte in range(256))]
    pieces += [
        (piece, -2.0) for piece in ("▁the", "▁sea", "▁", "t", "h", "e", "s", "海", "é", "▁▁")
    ]
    raw = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    raw.normalizer, raw.decoder = _normalizer(), _decoder()
    return raw


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte level": byte_level,
    "BPE with bytes": fallback_bpe,
    "unigram with bytes": fallback_unigram,
}


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> TextTokenizer:
    folder: Path = tmp_path_factory.mktemp("streams")
    KINDS[request.param]().save(str(folder / "tokenizer.json"))
    return TextTokenizer(folder)


@settings(max_examples=60)
@given(text=TEXTS)
def test_every_split_reads_as_the_whole(tokenizer: TextTokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    whole = tokenizer.decode(ids, skip_special_tokens=True)
    if text and not text.startswith(" "):
        assert whole == text, "the vocabulary loses text, so that this test says less"
    splits = [[ids[:at], ids[at:]] for at in range(len(ids) + 1)]
    for pieces in ([[one] for one in ids], *splits):
        detokenizer = tokenizer.detokenizer(skip_special_tokens=True)
        shown = [detokenizer.feed(piece) for piece in pieces]
        assert "".join(shown) + detokenizer.flush() == whole
        if "\ufffd" not in text:
            assert not any("\ufffd" in one for one in shown)


def test_control_tokens_do_end_within_characters(tokenizer: TextTokenizer) -> None:
    """Otherwise the rule above would hold for anybody, also for who decodes token by token."""
    text = "x 🜚 \U0010ffff" + unicodedata.normalize("NFD", "ö")
    ids = tokenizer.encode(text, add_special_tokens=False)
    alone = "".join(tokenizer.decode([one], skip_special_tokens=True) for one in ids)
    assert "\ufffd" in alone

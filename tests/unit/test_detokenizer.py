"""Incremental decoding equals decoding the whole, however the tokens are cut into deltas."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from frontend.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer
from frontend.tokenizer import TextTokenizer
from tests.service.frontends import SPECIALS, byte_tokenizer, write_tokenizer
from tidemill.runtime.errors import FailedPrecondition

RAW = byte_tokenizer()
SIZE = RAW.get_vocab_size(with_added_tokens=True)
TEXTS = st.text(
    st.one_of(st.characters(exclude_categories=("Cs",)), st.sampled_from("hello wor é世🌊")),
    max_size=40,
)


def bounded() -> TextTokenizer:
    with TemporaryDirectory() as name:
        write_tokenizer(Path(name))
        return TextTokenizer(Path(name))


BOUNDED = bounded()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return TextTokenizer(folder)


@pytest.fixture(scope="module")
def fallback(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    """SentencePiece-like: words with a leading mark, the rest as byte tokens."""
    words = ["▁sea", "▁tide", "s", "▁", "ü"]
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocab |= {word: 256 + i for i, word in enumerate(words)}
    raw = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    raw.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    folder = tmp_path_factory.mktemp("fallback")
    raw.save(str(folder / "tokenizer.json"))
    return TextTokenizer(folder)


WORDS = ("sea", "tide", "é", "x", "<a>", "<b>", "<c>")


@pytest.fixture(scope="module")
def spaced(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    """Whole words, no decoder, three special tokens."""
    raw = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="x"))
    raw.add_special_tokens(list(WORDS[4:]))
    folder = tmp_path_factory.mktemp("spaced")
    raw.save(str(folder / "tokenizer.json"))
    return TextTokenizer(folder)


def in_pieces(detokenizer: Detokenizer, ids: list[int], cuts: list[int]) -> list[str]:
    """One text per delta between the cuts, then the flush."""
    edges = [0, *sorted(cuts), len(ids)]
    return [
        *(detokenizer.feed(ids[a:b]) for a, b in pairwise(edges)),
        detokenizer.flush(),
    ]


@given(text=TEXTS, draw=st.randoms(use_true_random=False))
def test_text_comes_back_for_every_split(
    tokenizer: TextTokenizer, text: str, draw: random.Random
) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    for _ in range(4):
        cuts = [draw.randint(0, len(ids)) for _ in range(draw.randint(0, 8))]
        detokenizer = tokenizer.detokenizer(skip_special_tokens=True)
        assert isinstance(detokenizer, ByteDetokenizer)
        assert "".join(in_pieces(detokenizer, ids, cuts)) == text


@given(
    ids=st.lists(st.integers(0, SIZE + 3), max_size=60),
    skips=st.booleans(),
    draw=st.randoms(use_true_random=False),
)
def test_any_ids_decode_as_the_library_decodes_the_whole(
    tokenizer: TextTokenizer, ids: list[int], skips: bool, draw: random.Random
) -> None:
    """Random bytes are mostly invalid UTF-8; ids without a token decode to nothing."""
    cuts = [draw.randint(0, len(ids)) for _ in range(6)]
    detokenizer = tokenizer.detokenizer(skip_special_tokens=skips)
    whole = RAW.decode(ids, skip_special_tokens=skips)
    assert "".join(in_pieces(detokenizer, ids, cuts)) == whole


@given(text=TEXTS)
def test_no_half_character_is_ever_shown(tokenizer: TextTokenizer, text: str) -> None:
    text = text.replace("\ufffd", "")
    detokenizer = tokenizer.detokenizer(skip_special_tokens=True)
    shown = ""
    for token in tokenizer.encode(text, add_special_tokens=False):
        shown += detokenizer.feed([token])
        assert text.startswith(shown)


def test_control_decoding_each_token_alone_breaks_characters(tokenizer: TextTokenizer) -> None:
    """The rule above fails for the obvious wrong way."""
    ids = tokenizer.encode("é世", add_special_tokens=False)
    alone = "".join(tokenizer.decode([i], skip_special_tokens=True) for i in ids)
    assert alone != "é世"
    assert "\ufffd" in alone


def test_an_incomplete_character_is_flushed_as_a_replacement(tokenizer: TextTokenizer) -> None:
    detokenizer = tokenizer.detokenizer(skip_special_tokens=True)
    assert detokenizer.feed([104, 0xE4, 0xB8]) == "h"
    assert detokenizer.flush() == "\ufffd"


@given(
    words=st.lists(st.sampled_from(["▁sea", "▁tide", "s", "▁", "ü", "世", "🌊", "é"]), max_size=20),
    draw=st.randoms(use_true_random=False),
)
def test_byte_fallback_decodes_like_the_whole(
    fallback: TextTokenizer, words: list[str], draw: random.Random
) -> None:
    known = {"▁sea": 256, "▁tide": 257, "s": 258, "▁": 259, "ü": 260}
    ids = [i for w in words for i in ([known[w]] if w in known else w.encode())]
    detokenizer = fallback.detokenizer(skip_special_tokens=True)
    assert isinstance(detokenizer, WindowDetokenizer)
    cuts = [draw.randint(0, len(ids)) for _ in range(6)]
    whole = fallback.decode(ids, skip_special_tokens=True)
    assert "".join(in_pieces(detokenizer, ids, cuts)) == whole


def test_a_window_over_endless_invalid_bytes_stays_small(fallback: TextTokenizer) -> None:
    longest = 0

    def decode(ids: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return fallback.decode(ids, skip_special_tokens=True)

    detokenizer = WindowDetokenizer(decode)
    text = detokenizer.feed([0xFF] * 300) + detokenizer.flush()
    assert text == "\ufffd" * 300
    assert longest <= 32


def test_single_tokens_keep_their_bytes(tokenizer: TextTokenizer, fallback: TextTokenizer) -> None:
    assert tokenizer.piece(0xE4) == ("\ufffd", b"\xe4")
    assert tokenizer.piece(104) == ("h", b"h")
    assert fallback.piece(256) == (" sea", b" sea")
    assert fallback.piece(0xE4) == ("\ufffd", b"\xe4")


def test_a_folder_without_a_tokenizer_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(FailedPrecondition, match="--tokenizer"):
        TextTokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(FailedPrecondition, match="not a tokenizer"):
        TextTokenizer(tmp_path)


@given(text=TEXTS)
def test_no_text_has_fewer_tokens_than_its_length_tells(text: str) -> None:
    """Prompts are refused by this bound without being encoded; one token more would be wrong."""
    tokenizer = BOUNDED
    assert tokenizer.least_tokens(text) <= len(tokenizer.encode(text, add_special_tokens=False))


def test_the_bound_of_a_long_text_is_worth_something(fallback: TextTokenizer) -> None:
    longest = max(len(name) for name in SPECIALS)
    assert BOUNDED.least_tokens("a" * 10_000) == 10_000 // longest
    name = max(SPECIALS, key=len)
    assert BOUNDED.least_tokens(name * 50) == 50  # the tightest case: a larger bound were wrong
    assert len(BOUNDED.encode(name * 50, add_special_tokens=False)) == 50
    assert fallback.least_tokens("a" * 10_000) == 0, "nothing is known of this vocabulary"


@given(
    ids=st.lists(st.integers(0, 6), max_size=30),
    skips=st.booleans(),
    draw=st.randoms(use_true_random=False),
)
def test_special_tokens_in_a_row_need_no_spaces(
    spaced: TextTokenizer, ids: list[int], skips: bool, draw: random.Random
) -> None:
    """Without a decoder the library puts a space in front of every token but the first."""
    cuts = [draw.randint(0, len(ids)) for _ in range(4)]
    text, before = "", None
    for token_id in ids:
        is_special = token_id >= 4
        if is_special and skips:
            continue
        follows = before is not None and before >= 4 and is_special
        text += ("" if before is None or follows else " ") + WORDS[token_id]
        before = token_id
    detokenizer = spaced.detokenizer(skip_special_tokens=skips, spaces_between_special_tokens=False)
    assert "".join(in_pieces(detokenizer, ids, cuts)) == text
    flags = {"skip_special_tokens": skips}
    assert spaced.decode(ids, **flags, spaces_between_special_tokens=False) == text
    with_spaces = spaced.detokenizer(**flags)
    assert "".join(in_pieces(with_spaces, ids, cuts)) == spaced.decode(ids, **flags)


def test_spaces_between_special_tokens_are_the_default(
    spaced: TextTokenizer, tokenizer: TextTokenizer
) -> None:
    """Negative control. Byte-level vocabularies have no such spaces."""
    assert spaced.decode([0, 4, 5], skip_special_tokens=False) == "sea <a> <b>"
    end = tokenizer.encode(SPECIALS[0] * 2, add_special_tokens=False)
    for spaces in (True, False):
        flags = {"skip_special_tokens": False, "spaces_between_special_tokens": spaces}
        assert tokenizer.detokenizer(**flags).feed(end) == SPECIALS[0] * 2


@given(
    words=st.lists(st.sampled_from(["▁sea", "▁tide", "s", "▁", "ü", "世", "🌊"]), max_size=30),
    at=st.integers(0, 30),
)
def test_behind_a_prompt_text_goes_on(fallback: TextTokenizer, words: list[str], at: int) -> None:
    """Prompt and output add up to the text of both: no space is lost where the output begins."""
    known = {"▁sea": 256, "▁tide": 257, "s": 258, "▁": 259, "ü": 260}
    first, then = (
        [i for word in part for i in ([known[word]] if word in known else word.encode())]
        for part in (words[:at], words[at:])
    )
    detokenizer = fallback.detokenizer(skip_special_tokens=True, before=first[-8:])
    said = detokenizer.feed(then) + detokenizer.flush()
    texts = [fallback.decode(ids, skip_special_tokens=True) for ids in (first, first + then)]
    assert texts[0] + said == texts[1]


def test_control_without_the_prompt_a_space_is_lost(fallback: TextTokenizer) -> None:
    for before, said in (([256], " tide"), ([], "tide"), ([0xE4, 0xB8], "tide")):
        detokenizer = fallback.detokenizer(skip_special_tokens=True, before=before)
        assert detokenizer.feed([257]) + detokenizer.flush() == said


@pytest.mark.parametrize("bad", [-1, 1 << 40, 1.5])
def test_ids_in_front_are_not_read_before_they_are_checked(
    fallback: TextTokenizer, bad: int
) -> None:
    """Who refuses them says which."""
    fallback.detokenizer(skip_special_tokens=True, before=[bad])
    with pytest.raises((OverflowError, TypeError)):
        fallback.detokenizer(skip_special_tokens=True, before=[bad]).feed([256])

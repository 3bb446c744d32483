"""Models that come with a SentencePiece file alone get the tokens that SentencePiece gives."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
import sentencepiece
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine_service.constraints.llguidance import LlGrammars
from engine_service.core.params import ConstraintSpec
from frontend.tokenizer import TextTokenizer
from tidemill.runtime.errors import FailedPrecondition, Unsupported
from tidemill.sentencepiece import tokenizer_json

CORPUS = [
    "The sea is calm tonight.",
    "The tide is full, the moon lies fair",
    "naïve café Größe 東京の海",
    "def f(x): return x",
] * 20
TEXTS = st.text(
    st.one_of(
        st.characters(exclude_categories=("Cs", "Cc")), st.sampled_from("the sea é東🌊 \n\t")
    ),
    max_size=24,
)
SETTINGS = {
    "tokenizer_class": "LlamaTokenizer",
    "bos_token": "<s>",
    "eos_token": "</s>",
    "add_bos_token": True,
}


def trained(kind: str) -> bytes:
    """A tokenizer.model with a token for every byte."""
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=written,
        model_type=kind,
        vocab_size=340,
        hard_vocab_limit=False,
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    return written.getvalue()


def write(folder: Path, kind: str, **settings: str) -> Path:
    folder.joinpath("tokenizer.model").write_bytes(trained(kind))
    folder.joinpath("tokenizer_config.json").write_text(json.dumps({**SETTINGS, **settings}))
    return folder


@pytest.fixture(scope="module", params=["bpe", "unigram"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def ours(folder: Path) -> TextTokenizer:
    return TextTokenizer(folder)


@pytest.fixture(scope="module")
def exact(folder: Path) -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))


@settings(max_examples=200)
@given(text=TEXTS.filter(lambda text: not text.startswith((" ", "▁"))))
@example(text="ca")  # one piece, which merges do not find
def test_tokens_and_texts_are_those_of_sentencepiece(
    ours: TextTokenizer, exact: sentencepiece.SentencePieceProcessor, text: str
) -> None:
    ids = ours.encode(text, add_special_tokens=False)
    if not any(name in text for name in ("<s>", "</s>", "<unk>")):
        assert ids == exact.encode(text)
    assert ours.decode(ids, skip_special_tokens=True) == exact.decode(ids)
    streamed = ours.detokenizer(skip_special_tokens=True)
    assert "".join(streamed.feed([one]) for one in ids) + streamed.flush() == exact.decode(ids)


def test_special_tokens_and_settings_come_from_the_folder(ours: TextTokenizer) -> None:
    assert ours.template_variables == {"bos_token": "<s>", "eos_token": "</s>"}
    marked = ours.encode("<s>the</s>", add_special_tokens=False)
    assert (marked[0], marked[-1]) == (1, 2)
    ids = ours.encode("the sea", add_special_tokens=True)
    assert ids[0] == 1
    assert ours.decode(ids, skip_special_tokens=True) == "the sea"


def test_grammars_know_the_vocabulary(folder: Path, ours: TextTokenizer) -> None:
    grammars = LlGrammars(str(folder), vocab_size=400, eos_token_ids=[2])
    matcher = grammars.open(ConstraintSpec("choice", '["the sea"]'))
    text: list[int] = []
    while not matcher.is_complete:
        (mask,) = grammars.masks([matcher])
        allowed = [i for i in range(400) if mask[i >> 3] >> (i & 7) & 1]
        matcher.accept(allowed[-1])
        text += [one for one in allowed[-1:] if one != 2]
        assert not matcher.failure
    assert ours.decode(text, skip_special_tokens=True).strip() == "the sea"


def test_a_class_that_reads_the_file_in_another_way_is_refused(tmp_path: Path) -> None:
    """Negative control of the comparison: XLM-R moves the ids."""
    write(tmp_path, "unigram", tokenizer_class="XLMRobertaTokenizer")
    with pytest.raises(FailedPrecondition, match="as SentencePiece does"):
        TextTokenizer(tmp_path)


def test_what_cannot_be_read_says_so(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"no model")
    with pytest.raises(FailedPrecondition, match="cannot be converted as a LlamaTokenizer"):
        tokenizer_json(tmp_path)
    write(tmp_path, "bpe", tokenizer_class="NobodysTokenizer")
    with pytest.raises(FailedPrecondition, match="cannot be converted as a NobodysTokenizer"):
        tokenizer_json(tmp_path)


@pytest.mark.parametrize("settings", ["{", "[]", "[" * 100_000])
def test_settings_that_cannot_be_read_say_so(tmp_path: Path, settings: str) -> None:
    write(tmp_path, "bpe")
    (tmp_path / "tokenizer_config.json").write_text(settings)
    with pytest.raises(FailedPrecondition, match="cannot be converted as a LlamaTokenizer"):
        tokenizer_json(tmp_path)


def test_without_the_library_both_services_say_what_to_install(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(FailedPrecondition, match=r"needs sentencepiece.*pip install"):
        TextTokenizer(folder)
    grammars = LlGrammars(str(folder), vocab_size=400, eos_token_ids=[2])
    with pytest.raises(Unsupported, match="needs sentencepiece"):
        grammars.compile(ConstraintSpec("regex", "a"))

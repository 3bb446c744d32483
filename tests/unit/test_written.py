"""Files that came with a mark in front of their UTF-8 are read as without it, by whoever reads."""

from __future__ import annotations

import codecs
import shutil
from pathlib import Path

from engine_service.constraints.llguidance import LlGrammars
from engine_service.core.params import ConstraintSpec
from engine_service.model_folder import builtin_models
from frontend.request import Chat
from frontend.served import read_labels
from frontend.template import load_template
from frontend.tokenizer import TextTokenizer
from tidemill.security.keys import KeyRing, new_key


def mark(path: Path) -> Path:
    path.write_bytes(codecs.BOM_UTF8 + path.read_bytes())
    return path


def test_a_tokenizer_and_its_template(tmp_path: Path) -> None:
    said = Chat(messages=[{"role": "user", "content": "a"}])
    demo = builtin_models()["demo"]
    plain = TextTokenizer(demo)
    expected = load_template(plain, None).render(said)
    for path in demo.glob("*.json"):
        mark(Path(shutil.copy(path, tmp_path)))
    marked = TextTokenizer(tmp_path)
    assert marked.encode("abc", add_special_tokens=False) == [97, 98, 99]
    assert load_template(marked, None).render(said) == expected
    (tmp_path / "chat_template.jinja").write_text(plain.chat_template or "")
    own = mark(tmp_path / "chat_template.jinja")
    assert load_template(TextTokenizer(tmp_path), None).render(said) == expected
    assert load_template(marked, str(own)).render(said) == expected, "it began with the mark"


def test_the_vocabulary_of_grammars(tmp_path: Path) -> None:
    mark(Path(shutil.copy(builtin_models()["demo"] / "tokenizer.json", tmp_path)))
    grammars = LlGrammars(str(tmp_path), vocab_size=320, eos_token_ids=[257])
    grammars.compile(ConstraintSpec("regex", "a"))


def test_names_of_labels_and_keys(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"id2label": {"0": "a"}}')
    assert read_labels(mark(path)) == {0: "a"}
    made = new_key("alice")
    path.write_text(made.line)
    assert KeyRing(str(mark(path))).name_of(made.key) == "alice"

"""Model names become folders; everything that can be wrong with one has an error with a remedy."""

import codecs
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from engine_service import model_folder
from engine_service.config import EngineConfig
from engine_service.model_folder import builtin_models
from engine_service.worker import checkpoint
from engine_service.worker.checkpoint import Checkpoint, fetch_checkpoint
from tidemill.runtime.errors import InvalidRequest, NotFound, ServiceError


def fetch(**config: Any) -> Checkpoint:
    return fetch_checkpoint(EngineConfig(**config), lambda *_: None)


def refuse(kind: type[ServiceError], match: str, **config: Any) -> ServiceError:
    with pytest.raises(kind, match=match) as caught:
        fetch(**config)
    return caught.value


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    return tmp_path


def test_builtin_models_have_tokenizers() -> None:
    for name, path in builtin_models().items():
        found = fetch(model=name)
        assert (found.model_id, found.folder, found.tokenizer_dir) == (name, path, str(path))
        assert found.hf_config["architectures"]


def test_local_folder(folder: Path) -> None:
    found = fetch(model=str(folder))
    assert (found.folder, found.model_id) == (folder, str(folder))
    assert found.hf_config == {"architectures": ["LlamaForCausalLM"]}
    assert (found.generation_config, found.added_tokens, found.tokenizer_dir) == ({}, {}, "")


def test_added_tokens_come_from_all_files(folder: Path) -> None:
    (folder / "added_tokens.json").write_text('{"<a>": 1, "<b>": 2}')
    decoder = {"added_tokens_decoder": {"3": {"content": "<c>"}}}
    (folder / "tokenizer_config.json").write_text(json.dumps(decoder))
    (folder / "tokenizer.json").write_text('{"added_tokens": [{"id": 4, "content": "<b>"}]}')
    found = fetch(model=str(folder))
    assert found.added_tokens == {"<a>": 1, "<b>": 4, "<c>": 3}
    assert found.tokenizer_dir == str(folder)


def test_another_tokenizer_folder(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "tokenizer"
    other.mkdir()
    (other / "tokenizer.json").write_text('{"added_tokens": [{"id": 4, "content": "<x>"}]}')
    found = fetch(model=str(folder), tokenizer=str(other))
    assert (found.tokenizer_dir, found.added_tokens) == (str(other), {"<x>": 4})
    (other / "tokenizer.json").unlink()
    refuse(NotFound, "has none of tokenizer.json", model=str(folder), tokenizer=str(other))


def test_weight_version_follows_the_weights(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(b"one")
    first = fetch(model=str(folder)).weight_version
    assert fetch(model=str(folder)).weight_version == first
    weights.write_bytes(b"another")
    second = fetch(model=str(folder)).weight_version
    dummies = {
        fetch(model=str(folder), load_format="dummy", seed=seed).weight_version for seed in (1, 2)
    }
    assert len({first, second, *dummies}) == 4


def test_builtin_models_are_the_same_ones_wherever_they_are_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hosts of a group compare weight versions, and an installer writes files at its own time."""
    known = fetch(model="demo").weight_version
    copy = tmp_path / "demo"
    shutil.copytree(builtin_models()["demo"], copy)
    for module in (checkpoint, model_folder):
        monkeypatch.setattr(module, "builtin_models", lambda: {"demo": copy})
    for path in copy.iterdir():
        os.utime(path, (1e9, 1e9))
    assert fetch(model="demo").weight_version == known
    with (copy / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    assert fetch(model="demo").weight_version != known


def test_a_seed_says_nothing_about_weights_that_are_read(folder: Path) -> None:
    assert len({fetch(model=str(folder), seed=seed).weight_version for seed in (1, 2)}) == 1


def test_missing_config(tmp_path: Path) -> None:
    error = refuse(NotFound, r"no config\.json; point --model at", model=str(tmp_path))
    assert error.reason == "CONFIG_MISSING"


@pytest.mark.parametrize(
    "content", ['{"architectures": ["Llama', "", "[1, 2]", "\x00\x01", "[" * 10**5]
)
def test_broken_config(content: str, folder: Path) -> None:
    (folder / "config.json").write_text(content)
    error = refuse(InvalidRequest, r"config\.json", model=str(folder))
    assert error.reason == "CHECKPOINT_CORRUPT"


def test_a_mark_in_front_of_a_file_is_no_part_of_it(folder: Path) -> None:
    """As editors of some systems write UTF-8: it was called truncated."""
    said = {"config.json": {"architectures": ["a"]}, "generation_config.json": {"top_k": 3}}
    for name, content in {**said, "added_tokens.json": {"<a>": 1}, "tokenizer.json": {}}.items():
        (folder / name).write_bytes(codecs.BOM_UTF8 + json.dumps(content).encode())
    found = fetch(model=str(folder))
    assert [found.hf_config, found.generation_config] == list(said.values())
    assert found.added_tokens == {"<a>": 1}


def test_binary_config(folder: Path) -> None:
    (folder / "config.json").write_bytes(b"\xff\xfe\x00garbage")
    refuse(InvalidRequest, r"config\.json is not valid JSON", model=str(folder))


def test_truncated_generation_config(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id"')
    refuse(InvalidRequest, r"generation_config\.json", model=str(folder))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer_config.json", {"added_tokens_decoder": {"1": "a"}}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"one": {"content": "a"}}}),
        ("tokenizer_config.json", {"added_tokens_decoder": 1}),
        ("tokenizer.json", {"added_tokens": [{"id": 1}]}),
        ("tokenizer.json", {"added_tokens": ["a"]}),
    ],
)
def test_added_tokens_that_are_none_name_their_file(
    name: str, content: dict[str, Any], folder: Path
) -> None:
    (folder / name).write_text(json.dumps(content))
    refuse(InvalidRequest, f"{name}: added_tokens", model=str(folder))


@pytest.mark.parametrize("name", ["demoo", "/no/such/folder", "./relative", "~/nowhere", "a/b/c"])
def test_unknown_names_say_what_a_model_may_be(name: str) -> None:
    error = refuse(NotFound, "owner/name", model=name)
    assert error.reason == "MODEL_NOT_FOUND"
    assert name in error.message


def test_a_file_is_no_model(folder: Path) -> None:
    refuse(InvalidRequest, "is a file", model=str(folder / "config.json"))

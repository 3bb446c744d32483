"""A name that is no model is refused before anything starts, in the same words by all verbs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from engine_service.model_folder import builtin_models, check_model, folder_of, read_config
from tests.waiting import PATIENCE_S
from tidemill import LLM
from tidemill.runtime.errors import InvalidRequest, NotFound, ServiceError

ROOT = Path(__file__).parents[2]
WITHOUT_ENGINE = """
import subprocess, sys
from tidemill.cli import main

def refuse(*_, **__):
    raise AssertionError("a process was started")

subprocess.Popen = refuse
status = main(sys.argv[1:])
loaded = {"torch", "huggingface_hub"} & set(sys.modules)
assert not loaded, f"{loaded} loaded before the model's name was looked at"
sys.exit(status)
"""
VERBS = (
    ["serve"],
    ["engine"],
    ["engine", "--data-parallel-size=2"],
    ["generate", "--prompt=x"],
    ["shard", "--output=out", "--tensor-parallel-size=2"],
    ["bench", "throughput"],
    ["bench", "online"],
    ["bench", "quality"],
)


def no_config(folder: Path) -> Path:
    (folder / "empty").mkdir()
    return folder / "empty"


def a_file(folder: Path) -> Path:
    (folder / "config.json").write_text("{}")
    return folder / "config.json"


def broken(folder: Path) -> Path:
    (folder / "config.json").write_text('{"architectures": ["Qwen3')
    return folder


def absent(folder: Path) -> Path:
    return folder / "no-such-model"


def refused(name: str) -> ServiceError:
    with pytest.raises(ServiceError) as caught:
        check_model(name)
    return caught.value


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
@pytest.mark.parametrize("make", [absent, no_config, a_file, broken])
def test_every_verb_refuses_at_once(tmp_path: Path, verb: list[str], make: object) -> None:
    name = str(make(tmp_path))  # type: ignore[operator]
    words = [sys.executable, "-c", WITHOUT_ENGINE, *verb, "--model", name]
    done = subprocess.run(
        words, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 1, done.stderr
    assert done.stderr == f"tidemill {verb[0]}: {refused(name).message}\n"


def test_an_llm_says_the_same(tmp_path: Path) -> None:
    for name in ("demmo", str(broken(tmp_path))):
        with pytest.raises(ServiceError) as caught:
            LLM(name)
        assert caught.value.message == refused(name).message


def test_what_was_given_what_was_looked_for_and_what_would_work(tmp_path: Path) -> None:
    error = refused(str(tmp_path / "no" / "such"))
    assert (type(error), error.reason) == (NotFound, "MODEL_NOT_FOUND")
    for said in (*builtin_models(), f"{tmp_path}/no/such does not exist", "owner/name"):
        assert said in error.message
    assert "did you mean" not in error.message
    assert "did you mean 'demo-block'? A hub" in refused("demo-blok").message


def test_the_nearest_folder_is_named_as_it_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "qwen3-8b").mkdir()
    (tmp_path / "qwen3-8c").mkdir()  # no model
    (tmp_path / "qwen3-8b" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    for start in ("", "./", f"{tmp_path}/"):
        assert f"did you mean '{start}qwen3-8b'?" in refused(f"{start}qwen3-8").message
    assert f"did you mean '{tmp_path}/qwen3-8b'?" in refused(str(tmp_path)).message
    assert (
        f"holds config.json, '{tmp_path}/qwen3-8b'"
        in refused(f"{tmp_path}/qwen3-8b/config.json").message
    )


@pytest.mark.parametrize(
    "name", ["a" * 300, "~nobody-of-this-name/model", "a\0b", "./" + "b" * 300]
)
def test_names_that_no_folder_can_have(name: str) -> None:
    assert type(refused(name)) is NotFound


def test_a_config_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")

    def deny(*_: object, **__: object) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", deny)
    with pytest.raises(InvalidRequest, match=r"config\.json cannot be read: .*Permission denied"):
        read_config(tmp_path)


def test_names_that_work(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"]}))
    for name in ("demo", str(tmp_path), "owner/name"):
        check_model(name)
    assert folder_of("owner/name") is None
    assert folder_of(str(tmp_path)) == tmp_path

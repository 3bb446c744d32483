"""What an operator says over config.json: merged before anything reads it, and part of what the
model is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine_service.config import EngineConfig
from engine_service.distributed import Group
from engine_service.hf_overrides import overridden, version_under
from engine_service.models.base import ModelTraits
from engine_service.ranks.likeness import difference, likeness
from engine_service.server.tokenizer_files import TokenizerFiles, read_tokenizer
from engine_service.worker.checkpoint import Checkpoint, fetch_checkpoint
from engine_service.worker.weights import read_traits
from frontend.fleet.same_model import common_facts
from frontend.served import read_labels
from tests.equivalence.test_shards import differing, load, make_source, shard
from tests.unit.test_transfer_roles import facts
from tidemill import LLM, SamplingParams, cli
from tidemill.runtime.errors import FailedPrecondition, InvalidRequest

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 100,
    "max_position_embeddings": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
}
BLOCK = {"mask_token_id": 99, "block_size": 4}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    made.mkdir()
    (made / "config.json").write_text(json.dumps(QWEN3))
    return made


def fetch(folder: Path, **overrides: Any) -> Checkpoint:
    config = EngineConfig(model=str(folder), load_format="dummy", hf_overrides=overrides)
    return fetch_checkpoint(config, lambda *_: None)


def traits(folder: Path, **overrides: Any) -> ModelTraits:
    return read_traits(fetch(folder, **overrides))


def test_objects_are_merged_key_by_key_and_everything_else_is_replaced() -> None:
    config = {"a": {"b": {"c": 1, "d": 2}, "e": [1, 2]}, "f": {"g": 1}, "h": 3}
    over = {"a": {"b": {"c": 9}, "e": [7]}, "f": None, "h": {"i": 1}, "new": {"j": 1}}
    assert overridden(config, over) == {
        "a": {"b": {"c": 9, "d": 2}, "e": [7]},
        "f": None,
        "h": {"i": 1},
        "new": {"j": 1},
    }
    assert config == {"a": {"b": {"c": 1, "d": 2}, "e": [1, 2]}, "f": {"g": 1}, "h": 3}
    assert overridden(config, {}) == config


def test_nested_keys_that_are_not_named_stay(folder: Path) -> None:
    linear = {"rope_type": "linear", "factor": 2.0}
    rope = traits(folder, rope_parameters=linear).rope
    assert rope is not None
    assert (rope.kind, rope.factor, rope.theta) == ("linear", 2.0, 5000.0)


def test_an_older_spelling_keeps_what_the_newer_one_says_of_theta(folder: Path) -> None:
    """Users write rope_scaling, whichever release of transformers wrote the config."""
    rope = traits(folder, rope_scaling={"rope_type": "linear", "factor": 2.0}).rope
    assert rope is not None
    assert (rope.kind, rope.factor, rope.theta) == ("linear", 2.0, 5000.0)


def test_a_qwen3_becomes_a_block_model(folder: Path) -> None:
    plain = traits(folder)
    assert (plain.methods, plain.mask_block) == (("autoregressive",), 1)
    block = traits(folder, **BLOCK)
    assert (block.methods, block.mask_block) == (("block_diffusion",), 4)
    assert (block.mask_token_id, block.logits_shift) == (99, 0)
    canvas = traits(folder, architectures=["DreamModel"], mask_token_id=98)
    assert (canvas.methods, canvas.logits_shift) == (("full_canvas",), 1)


def test_an_llm_generates_by_what_was_said(folder: Path) -> None:
    ways: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True, "device": "cpu"}
    asked = {"prompt_token_ids": [1, 2, 3]}
    params = SamplingParams(max_tokens=9, temperature=0, ignore_eos=True)
    with LLM(str(folder), hf_overrides=BLOCK, **ways) as llm:
        assert (llm.facts.methods, llm.facts.block_length) == (("block_diffusion",), 4)
        (output,) = llm.generate([asked], params, use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 9
        assert 99 not in output.outputs[0].token_ids
    with LLM(str(folder), **ways) as llm:
        assert llm.facts.methods == ("autoregressive",), "the control"


def test_the_version_of_the_weights_tells_what_was_said(folder: Path) -> None:
    said: tuple[dict[str, Any], ...] = (
        {},
        {"mask_token_id": 99, "block_size": 4},
        {"mask_token_id": 99, "block_size": 8},
        {"rope_parameters": {"rope_theta": 1.0}},
    )
    versions = [fetch(folder, **one).weight_version for one in said]
    assert len(set(versions)) == len(said)
    assert fetch(folder, block_size=4, mask_token_id=99).weight_version == versions[1], "any order"


def test_no_frontend_takes_engines_with_different_overrides() -> None:
    """The weights of one folder have other times on another host, and are the same all the same."""
    here, there, over = "1f", "2e", version_under("1f", BLOCK)
    common_facts(facts("both", weight_version=here), {"a:1": facts("x", weight_version=there)})
    common_facts(
        facts("both", weight_version=over),
        {"a:1": facts("x", weight_version=version_under(there, BLOCK))},
    )
    with pytest.raises(FailedPrecondition, match=r"digest of hf_overrides is .*a:1 is ''") as told:
        common_facts(facts("both", weight_version=over), {"a:1": facts("x", weight_version=here)})
    assert told.value.reason == "OTHER_MODEL"


def test_hosts_of_a_group_compare_it() -> None:
    own, other = (likeness(EngineConfig(hf_overrides=one)) for one in (BLOCK, {}))
    told = difference(own, other, "on rank 1")
    assert told is not None
    assert told.startswith("hf_overrides is {'mask_token_id': 99, 'block_size': 4} on rank 0")


@pytest.mark.parametrize(
    "wrong", [[1], '{"block_size": 4}', None, 4, lambda config: config, {1: 2}, {"a": {1, 2}}]
)
def test_a_keyword_that_is_no_json_object(folder: Path, wrong: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"^hf_overrides .*--hf-overrides '{") as caught:
        LLM(str(folder), hf_overrides=wrong, load_format="dummy", tensor_parallel_size=2)
    assert caught.value.param == "hf_overrides"


@pytest.mark.parametrize("verb", ["serve", "engine", "shard"])
@pytest.mark.parametrize("wrong", ["[]", "{", "4", "block_size=4", "null"])
def test_a_flag_that_is_no_json_object(
    verb: str, wrong: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([verb, f"--hf-overrides={wrong}"])
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert f"argument --hf-overrides: {wrong!r} is not a JSON object" in told


def test_the_command_line_takes_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["serve", "demo", "--hf-overrides", json.dumps(BLOCK), "--print-config"])
    assert json.loads(capsys.readouterr().out)["hf_overrides"] == BLOCK


def test_shards_hold_it(tmp_path: Path, seed: int) -> None:
    """They are cut by it, so their own config.json says it: engines need not be told again."""
    source = make_source(tmp_path / "source", QWEN3, seed)
    out = shard(source, 2, "--hf-overrides", json.dumps(BLOCK))
    found = json.loads((out / "config.json").read_text())
    assert found == QWEN3 | BLOCK
    shards, whole, plain = (
        fetch_checkpoint(EngineConfig(model=str(one), hf_overrides=over), lambda *_: None)
        for one, over in ((out, {}), (source, BLOCK), (source, {}))
    )
    assert shards.weight_version == whole.weight_version != plain.weight_version
    assert read_traits(shards) == read_traits(whole) != read_traits(plain)
    group = Group(1, 2)
    assert differing(load(out, group), load(source, group, hf_overrides=BLOCK)) == []


def served(files: TokenizerFiles, out: Path) -> Path:
    """As a frontend writes what it gets."""
    out.mkdir(exist_ok=True)
    for name, _ in files.files:
        (out / name).write_bytes(b"")
    for index, content in files.chunks(1 << 20):
        with (out / files.files[index][0]).open("ab") as file:
            file.write(content)
    assert {name: (out / name).stat().st_size for name, _ in files.files} == dict(files.files)
    return out


def test_frontends_read_labels_that_were_said_over(folder: Path, tmp_path: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    (folder / "config.json").write_text(json.dumps({"id2label": {"0": "a", "1": "b"}}))
    plain = read_tokenizer(str(folder), {})
    said = read_tokenizer(str(folder), {"id2label": {"1": "c"}})
    assert read_labels(served(plain, tmp_path / "0") / "config.json") == {0: "a", 1: "b"}
    assert read_labels(served(said, tmp_path / "1") / "config.json") == {0: "a", 1: "c"}
    assert json.loads(said.read("config.json")) == {"id2label": {"0": "a", "1": "c"}}
    assert plain.sha256 != said.sha256


@pytest.mark.parametrize("text", ["", "[]", "<html>", "[" * 100_000], ids=len)
def test_a_configuration_that_nobody_can_read_names_no_labels(tmp_path: Path, text: str) -> None:
    """It lies beside a tokenizer, whoever's; one that is nested without end raised RecursionError
    where a frontend loads it."""
    (tmp_path / "config.json").write_text(text)
    assert read_labels(tmp_path / "config.json") == {}

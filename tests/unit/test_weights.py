"""Weights go where they belong; a checkpoint that does not fit is refused naming the tensor."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine_service.config import EngineConfig
from engine_service.distributed import ALONE, Group
from engine_service.models.base import CausalModel
from engine_service.worker.checkpoint import fetch_checkpoint
from engine_service.worker.files import weight_files
from engine_service.worker.weights import load_model, read_traits, resolve_dtype
from tidemill.runtime.errors import InvalidRequest, NotFound, ServiceError, Unsupported

CPU = torch.device("cpu")
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 40,
    "max_position_embeddings": 64,
    "dtype": "bfloat16",
    "eos_token_id": 3,
}
LAYER = {
    "input_layernorm.weight": (16,),
    "post_attention_layernorm.weight": (16,),
    "self_attn.q_norm.weight": (8,),
    "self_attn.k_norm.weight": (8,),
    "self_attn.q_proj.weight": (32, 16),
    "self_attn.k_proj.weight": (16, 16),
    "self_attn.v_proj.weight": (16, 16),
    "self_attn.o_proj.weight": (16, 32),
    "mlp.gate_proj.weight": (24, 16),
    "mlp.up_proj.weight": (24, 16),
    "mlp.down_proj.weight": (16, 24),
}
SHAPES = {
    "model.embed_tokens.weight": (40, 16),
    "model.norm.weight": (16,),
    "lm_head.weight": (40, 16),
    **{f"model.layers.{i}.{name}": shape for i in (0, 1) for name, shape in LAYER.items()},
}


def write(folder: Path, tensors: dict[str, torch.Tensor], **config: Any) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    save_file(tensors, folder / "model.safetensors")


def random_tensors(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {name: torch.randn(shape) for name, shape in SHAPES.items()}


def load(
    folder: Path,
    reports: list[tuple[str, int, int]] | None = None,
    group: Group = ALONE,
    **config: Any,
) -> CausalModel:
    settings = EngineConfig(model=str(folder), **config)
    checkpoint = fetch_checkpoint(settings, lambda *_: None)

    def report(stage: str, done: int, total: int) -> None:
        if reports is not None:
            reports.append((stage, done, total))

    return load_model(
        settings, checkpoint, device=CPU, dtype=torch.float32, report=report, group=group
    )


def views_of(model: CausalModel) -> dict[str, torch.Tensor]:
    """What every tensor of the checkpoint went to, of a model that one rank holds."""
    return {name: slot.pieces[0].view for name, slot in model.weight_slots().items()}


def refuse(kind: type[ServiceError], folder: Path, match: str) -> ServiceError:
    with pytest.raises(kind, match=match) as caught:
        load(folder)
    return caught.value


def test_every_tensor_lands_in_its_slot(tmp_path: Path, seed: int) -> None:
    tensors = random_tensors(seed)
    write(tmp_path, tensors)
    reports: list[tuple[str, int, int]] = []
    slots = views_of(load(tmp_path, reports))
    assert slots.keys() == tensors.keys()
    for name, slot in slots.items():
        assert torch.equal(slot, tensors[name]), name
    assert reports == [("weights", done, len(SHAPES)) for done in range(1, len(SHAPES) + 1)]


def test_head_norms_reach_every_head(tmp_path: Path, seed: int) -> None:
    tensors = random_tensors(seed)
    write(tmp_path, tensors)
    norms = dict(load(tmp_path).named_parameters())["layers.1.attention.norm.weight"]
    q, k = (tensors[f"model.layers.1.self_attn.{kind}_norm.weight"] for kind in "qk")
    assert torch.equal(norms, torch.stack([q] * 4 + [k] * 2))


def test_other_formats_are_converted(tmp_path: Path, seed: int) -> None:
    tensors = random_tensors(seed)
    halves = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    write(tmp_path, halves)
    model = load(tmp_path)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    for name, slot in views_of(model).items():
        assert torch.equal(slot, halves[name].float()), name


@pytest.mark.parametrize(
    ("requested", "device", "dtype"),
    [
        ("auto", "cpu", torch.float32),
        ("auto", "cuda", torch.bfloat16),
        ("float16", "cuda", torch.float16),
        ("bfloat16", "cpu", torch.bfloat16),
    ],
)
def test_number_format(requested: Any, device: str, dtype: torch.dtype, tmp_path: Path) -> None:
    write(tmp_path, {})
    config = EngineConfig(model=str(tmp_path), dtype=requested)
    traits = read_traits(fetch_checkpoint(config, lambda *_: None))
    assert resolve_dtype(config, traits, torch.device(device)) == dtype


def test_gpus_without_bfloat16_take_float16(tmp_path: Path) -> None:
    write(tmp_path, {})
    config = EngineConfig(model=str(tmp_path))
    traits = read_traits(fetch_checkpoint(config, lambda *_: None))
    assert traits.dtype == "bfloat16"
    cuda = torch.device("cuda")
    assert resolve_dtype(config, traits, cuda, compute=(7, 5)) == torch.float16
    assert resolve_dtype(config, traits, cuda, compute=(8, 0)) == torch.bfloat16
    config = EngineConfig(model=str(tmp_path), dtype="bfloat16")
    with pytest.raises(Unsupported, match=r"this is 7\.5; pass --dtype float16"):
        resolve_dtype(config, traits, cuda, compute=(7, 5))


def test_stop_tokens_of_both_files(tmp_path: Path) -> None:
    write(tmp_path, {})
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 3]}')
    checkpoint = fetch_checkpoint(EngineConfig(model=str(tmp_path)), lambda *_: None)
    assert read_traits(checkpoint).eos_token_ids == (3, 5)


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_stop_tokens_that_the_vocabulary_lacks_are_left_out(tmp_path: Path, file: str) -> None:
    """Where they are suppressed (min_tokens) a step would write behind the logits."""
    write(tmp_path, {})
    said = json.loads((tmp_path / "config.json").read_text()) | {"eos_token_id": [40, 3, -1, 39]}
    (tmp_path / file).write_text(json.dumps(said))
    checkpoint = fetch_checkpoint(EngineConfig(model=str(tmp_path)), lambda *_: None)
    assert read_traits(checkpoint).eos_token_ids == (3, 39)


@pytest.mark.parametrize("said", ["3", [3, None], 3.0, True, {"id": 3}])
def test_a_stop_token_that_is_no_id_is_refused(tmp_path: Path, said: Any) -> None:
    write(tmp_path, {}, eos_token_id=said)
    checkpoint = fetch_checkpoint(EngineConfig(model=str(tmp_path)), lambda *_: None)
    with pytest.raises(InvalidRequest, match="eos_token_id must be a token id") as caught:
        read_traits(checkpoint)
    assert caught.value.param == "eos_token_id"


def test_the_end_of_a_turn_goes_by_the_tokenizers_names(tmp_path: Path) -> None:
    write(tmp_path, {})
    size = json.loads((tmp_path / "config.json").read_text())["vocab_size"]
    for number, turns in ((5, (5,)), (size, ())):
        names = {"<|im_end|>": number, "<|im_start|>": 4}
        listed = [{"content": name, "id": one} for name, one in names.items()]
        (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": listed}))
        checkpoint = fetch_checkpoint(EngineConfig(model=str(tmp_path)), lambda *_: None)
        got = read_traits(checkpoint)
        assert (got.eos_token_ids, got.eot_token_ids) == ((3,), turns)


def test_derived_and_tied_tensors_may_be_present(tmp_path: Path, seed: int) -> None:
    tensors = random_tensors(seed)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    write(tmp_path, tensors, tie_word_embeddings=True)
    model = load(tmp_path)
    hidden = torch.randn(2, 16)
    normed = torch.nn.functional.rms_norm(hidden, (16,), tensors["model.norm.weight"], 1e-6)
    want = normed @ tensors["model.embed_tokens.weight"].T
    torch.testing.assert_close(model.logits(hidden), want)


def test_missing_tensor(tmp_path: Path, seed: int) -> None:
    tensors = random_tensors(seed)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    write(tmp_path, tensors)
    error = refuse(InvalidRequest, tmp_path, r"1 tensors are missing.*layers\.1\.mlp\.up_proj")
    assert error.reason == "TENSOR_MISMATCH"


def test_unexpected_tensor(tmp_path: Path, seed: int) -> None:
    write(tmp_path, random_tensors(seed) | {"model.layers.2.mlp.router": torch.ones(1)})
    refuse(InvalidRequest, tmp_path, r"1 tensors are unknown.*layers\.2\.mlp\.router")


def test_wrong_shape(tmp_path: Path, seed: int) -> None:
    tensors = random_tensors(seed)
    write(tmp_path, tensors | {"model.norm.weight": torch.ones(17)})
    error = refuse(InvalidRequest, tmp_path, r"model\.norm\.weight has shape \[17\].*\[16\]")
    assert error.reason == "SHAPE_MISMATCH"


def test_quantized_tensor(tmp_path: Path, seed: int) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    write(tmp_path, random_tensors(seed) | {name: torch.ones(16, 24, dtype=torch.int8)})
    refuse(Unsupported, tmp_path, r"down_proj.weight has number format I8")


@pytest.mark.parametrize("kept", [0, 4, 40, 2000, -1])
def test_truncated_file(kept: int, tmp_path: Path, seed: int) -> None:
    write(tmp_path, random_tensors(seed))
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    error = refuse(InvalidRequest, tmp_path, r"model\.safetensors cannot be read.*fetch the file")
    assert error.reason == "CHECKPOINT_CORRUPT"


def test_lfs_pointer(tmp_path: Path) -> None:
    write(tmp_path, {})
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n"
    (tmp_path / "model.safetensors").write_text(pointer)
    refuse(InvalidRequest, tmp_path, "git lfs pull")


def test_no_weights_at_all(tmp_path: Path) -> None:
    write(tmp_path, {})
    (tmp_path / "model.safetensors").rename(tmp_path / "model.onnx")
    error = refuse(NotFound, tmp_path, "reads no other weight format")
    assert error.reason == "WEIGHTS_MISSING"


def shard(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """Splits the tensors over two files and writes the index; returns the second file."""
    write(folder, {})
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    files = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    weight_map = {name: files[place % 2] for place, name in enumerate(names)}
    for file in files:
        save_file(
            {name: tensors[name] for name in names if weight_map[name] == file}, folder / file
        )
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder / files[1]


def test_shards(tmp_path: Path, seed: int) -> None:
    tensors = random_tensors(seed)
    shard(tmp_path, tensors)
    for name, slot in views_of(load(tmp_path)).items():
        assert torch.equal(slot, tensors[name]), name


def test_missing_shard(tmp_path: Path, seed: int) -> None:
    shard(tmp_path, random_tensors(seed)).unlink()
    error = refuse(NotFound, tmp_path, r"1 of 2 weight files .*00002-of-00002")
    assert error.reason == "SHARD_MISSING"


def test_the_same_tensor_twice(tmp_path: Path, seed: int) -> None:
    tensors = random_tensors(seed)
    second = shard(tmp_path, tensors)
    save_file(tensors, second)
    refuse(InvalidRequest, tmp_path, "in a second file too")


@pytest.mark.parametrize("index", ["{}", '{"weight_map": {"a": 1, "b": "b.safetensors"}}'])
def test_broken_index(index: str, tmp_path: Path, seed: int) -> None:
    shard(tmp_path, random_tensors(seed))
    (tmp_path / "model.safetensors.index.json").write_text(index)
    refuse(InvalidRequest, tmp_path, "no weight_map")


def test_files_of_another_layout_are_found(tmp_path: Path) -> None:
    for name in ("consolidated.safetensors", "model-1.safetensors", "model-2.safetensors"):
        (tmp_path / name).touch()
    assert [path.name for path in weight_files(tmp_path)] == [
        "model-1.safetensors",
        "model-2.safetensors",
    ]


def test_variants_beside_the_weights_are_not_read(tmp_path: Path, seed: int) -> None:
    tensors = random_tensors(seed)
    write(tmp_path, tensors)
    halves = {name: tensor.half() for name, tensor in tensors.items()}
    save_file(halves, tmp_path / "model.fp16.safetensors")
    for name, slot in views_of(load(tmp_path)).items():
        assert torch.equal(slot, tensors[name]), name


def test_dummy_weights_depend_on_seed_and_name_only(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    first, again, other = (
        views_of(load(tmp_path, load_format="dummy", seed=seed)) for seed in (1, 1, 2)
    )
    name = "model.layers.0.mlp.up_proj.weight"
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not torch.equal(first[name], other[name])
    assert not torch.equal(first[name], first[name.replace("layers.0", "layers.1")])
    assert first[name].std() == pytest.approx(16**-0.5, rel=0.2)
    assert bool((first["model.norm.weight"] == 1).all())
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": 1}))
    shorter = views_of(load(tmp_path, load_format="dummy", seed=1))
    assert torch.equal(first[name], shorter[name])


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("load_format", ["safetensors", "dummy"])
def test_ranks_hold_shares_of_the_same_tensors(
    tmp_path: Path, seed: int, size: int, load_format: str
) -> None:
    """Put together by the checkpoint's axes they are the whole; four ranks share two KV heads."""
    write(tmp_path, random_tensors(seed))
    whole = views_of(load(tmp_path, load_format=load_format))
    filled = {name: torch.full(view.shape, torch.nan) for name, view in whole.items()}
    shares = [
        load(tmp_path, load_format=load_format, group=Group(rank, size)) for rank in range(size)
    ]
    for model in shares:
        for name, slot in model.weight_slots().items():
            assert slot.shape == whole[name].shape
            for view, where in slot.pieces:
                filled[name][where or ...] = view
    for name, view in whole.items():
        assert torch.equal(filled[name], view), name
    held = sum(slot.nbytes for slot in shares[0].weight_slots().values())
    assert held < sum(view.nbytes for view in whole.values()) * (0.6 if size == 2 else 0.4)


def test_a_rank_reads_no_more_than_its_share(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, random_tensors(seed))
    sizes: list[int] = []
    copy = torch.Tensor.copy_

    def watched(view: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.nbytes)
        return copy(view, tensor)

    monkeypatch.setattr(torch.Tensor, "copy_", watched)
    model = load(tmp_path, group=Group(1, 2))
    slots = model.weight_slots().values()
    assert sorted(sizes)[-5:] == sorted(p.view.nbytes for slot in slots for p in slot.pieces)[-5:]


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickles_are_refused_unopened(tmp_path: Path, name: str) -> None:
    """Whatever is in it does not run, and the error says how to convert it."""
    trap = tmp_path / "sprung"
    (tmp_path / name).write_bytes(f"cbuiltins\nopen\n(V{trap}\nVw\ntR.".encode())
    with pytest.raises(Unsupported, match=f"{name}, a pickle.*save_pretrained") as refused:
        weight_files(tmp_path)
    assert refused.value.reason == "PICKLED_WEIGHTS"
    assert not trap.exists()
    pickle.loads((tmp_path / name).read_bytes()).close()  # the trap is one
    assert trap.exists()


def test_pickles_beside_safetensors_are_left_alone(tmp_path: Path) -> None:
    for name in ("pytorch_model.bin", "model.safetensors"):
        (tmp_path / name).touch()
    assert [path.name for path in weight_files(tmp_path)] == ["model.safetensors"]

"""Folders that `tidemill shard` makes: every rank holds the same numbers as from the source."""

from __future__ import annotations

import json
import os
import resource
import shlex
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine_service.composition import compose
from engine_service.config import EngineConfig
from engine_service.distributed import ALONE, Group
from engine_service.models.base import CausalModel
from engine_service.worker import shard_writer
from engine_service.worker.checkpoint import fetch_checkpoint
from engine_service.worker.files import MANIFEST
from engine_service.worker.shards import file_name
from engine_service.worker.weights import check_files, load_model
from tests.equivalence.shapes import SHAPES
from tests.equivalence.test_tensor_parallel import answers, make_cases
from tidemill.cli import main
from tidemill.runtime.errors import (
    FailedPrecondition,
    InvalidRequest,
    NotFound,
    ServiceError,
    Unsupported,
)

NAMES = [name for name, shape in SHAPES.items() if not shape.knobs.keys() & {"cache", "cfg_scale"}]


def load(folder: Path, group: Group = ALONE, **config: Any) -> CausalModel:
    settings = EngineConfig(model=str(folder), **config)
    checkpoint = fetch_checkpoint(settings, lambda *_: None)
    where: dict[str, Any] = {"device": torch.device("cpu"), "dtype": torch.float32}
    return load_model(settings, checkpoint, report=lambda *_: None, group=group, **where)


def make_source(folder: Path, config: dict[str, Any], seed: int) -> Path:
    """A checkpoint of random weights in two files, with an index and a tokenizer's file."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    slots = load(folder, load_format="dummy", seed=seed).weight_slots()
    tensors = {}
    for name, slot in slots.items():
        whole = torch.zeros(slot.shape)
        for view, where in slot.pieces:
            whole[where or ...] = view
        tensors[name] = whole + 0.01 * torch.randn(slot.shape)  # biases, too, are numbers
    weight_map: dict[str, str] = {}
    for index in range(2):
        own = {name: tensors[name] for name in sorted(tensors)[index::2]}
        path = folder / f"model-{index}.safetensors"
        save_file(own, path)
        weight_map |= dict.fromkeys(own, path.name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def shard(source: Path, size: int, *flags: str) -> Path:
    out = source.parent / f"{source.name}-{size}"
    words = [str(source), str(out), "--tensor-parallel-size", str(size), *flags]
    assert main(["shard", *words]) == 0
    return out


def differing(one: CausalModel, other: CausalModel) -> list[str]:
    """Parameters of two models of one rank that are not bit for bit the same."""
    pairs = zip(one.named_parameters(), other.named_parameters(), strict=True)
    return [name for (name, left), (_, right) in pairs if not torch.equal(left, right)]


@pytest.mark.parametrize("name", NAMES)
def test_every_rank_of_every_architecture_holds_the_same_bits(
    tmp_path: Path, name: str, seed: int
) -> None:
    torch.manual_seed(seed)
    source = make_source(tmp_path / "source", SHAPES[name].config, seed)
    for size in (1, *SHAPES[name].sizes):
        out = shard(source, size)
        assert sorted(path.name for path in out.iterdir()) == sorted(
            ["config.json", "tokenizer.json", MANIFEST, *(file_name(r, size) for r in range(size))]
        )
        for rank in range(size):
            group = Group(rank, size)
            assert differing(load(out, group), load(source, group)) == []
        whole = sum(path.stat().st_size for path in source.glob("*.safetensors"))
        assert all(path.stat().st_size < 0.75 * whole for path in out.glob("rank*")) or size == 1
    if name == "qwen3":  # the control: another rank's file has the same shapes
        first, second = (out / file_name(rank, size) for rank in (0, 1))
        shutil.copyfile(second, first)
        assert differing(load(out, Group(0, size)), load(source, Group(0, size)))


def test_all_files_are_on_the_disk_before_the_folder_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that dies later would leave a folder that looks whole."""
    source, synced = make_source(tmp_path / "source", SHAPES["qwen3"].config, 0), set()
    (source / "1_Pooling").mkdir()
    (source / "1_Pooling" / "config.json").write_text("{}")
    fsync, rename = os.fsync, os.rename

    def synced_to(file: int) -> None:
        synced.add(Path(f"/proc/self/fd/{file}").readlink())
        fsync(file)

    def renamed(folder: Path, out: Path) -> None:
        assert {folder, *folder.rglob("*")} <= synced
        rename(folder, out)
        synced.clear()

    monkeypatch.setattr(os, "fsync", synced_to)
    monkeypatch.setattr(os, "rename", renamed)
    shard(source, 2)
    assert synced == {tmp_path}


@pytest.mark.timeout(300)
def test_two_ranks_answer_the_same_from_shards(tmp_path: Path, seed: int) -> None:
    """Through whole engines; the control is another checkpoint of the same shape."""
    torch.manual_seed(seed)
    case = make_cases(tmp_path, ["llada2-moe"])[0]
    source, other = (
        make_source(tmp_path / name, SHAPES["llada2-moe"].config, seed + index)
        for index, name in enumerate(("source", "other"))
    )
    cases = []
    for folder in (source, shard(source, 2), other):
        config = case["config"] | {"model": str(folder), "load_format": "auto"}
        cases.append(case | {"config": config})
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    ((from_source, from_shards, from_other),) = answers((tmp_path, 2, 1))
    assert from_shards == from_source
    assert from_other != from_source


@pytest.mark.parametrize("flags", [(), ("--expert-parallel",)])
def test_the_command_that_is_told_is_one_that_serves_the_folder(
    tmp_path: Path, flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    source = make_source(tmp_path / "a source", SHAPES["llada2-moe"].config, 0)
    out = shard(source, 2, *flags)
    words = ["tidemill", "serve", str(out), "--tensor-parallel-size", "2", *flags]
    assert shlex.split(capsys.readouterr().err) == words


@pytest.fixture
def made(tmp_path: Path, seed: int) -> Path:
    return shard(make_source(tmp_path / "source", SHAPES["qwen3"].config, seed), 2)


def refused(folder: Path, group: Group) -> ServiceError:
    settings = EngineConfig(model=str(folder))
    with pytest.raises(ServiceError) as caught:
        check_files(settings, fetch_checkpoint(settings, lambda *_: None), group)
    return caught.value


def test_a_rank_needs_its_own_file_only(made: Path) -> None:
    (made / file_name(1, 2)).unlink()
    load(made, Group(0, 2))
    error = refused(made, Group(1, 2))
    assert (type(error), error.reason) == (NotFound, "SHARD_MISSING")
    assert file_name(1, 2) in error.message


def test_another_size_is_refused(made: Path) -> None:
    for size in (1, 4):
        error = refused(made, Group(0, size))
        assert (type(error), error.param) == (InvalidRequest, "tensor_parallel_size")
        assert f"made for tensor_parallel_size 2, this engine has {size}" in error.message
        assert "pass --tensor-parallel-size 2" in error.message


@pytest.mark.parametrize("size", [3, 4])
def test_an_engine_of_another_size_is_refused_before_any_rank_starts(made: Path, size: int) -> None:
    """3 ranks have no share of this model, but neither have 1 or 4 of these files."""
    config = EngineConfig(model=str(made), device="cpu", tensor_parallel_size=size)
    stages: list[str] = []
    told = rf"made for tensor_parallel_size 2, this engine has {size}: pass --tensor-p\S+ 2, or"
    with pytest.raises(InvalidRequest, match=told):
        compose(config, lambda stage, *_: stages.append(stage))
    assert "ranks" not in stages


def test_files_of_ranks_without_their_manifest_are_told(made: Path) -> None:
    (made / MANIFEST).unlink()
    error = refused(made, Group(0, 2))
    assert (type(error), error.reason) == (NotFound, "SHARD_MISSING")
    assert f"no {MANIFEST}" in error.message


def test_a_size_is_refused_before_weights_are_fetched(tmp_path: Path, seed: int) -> None:
    source = make_source(tmp_path / "source", SHAPES["qwen3"].config, seed)
    for file in source.glob("*.safetensors*"):
        file.unlink()
    with pytest.raises(InvalidRequest, match="size 3 does not divide"):
        write(source, tmp_path / "out", 3)
    with pytest.raises(NotFound, match="has no"):
        write(source, tmp_path / "out")


def test_a_truncated_file_is_refused(made: Path) -> None:
    path = made / file_name(0, 2)
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-4])
    error = refused(made, Group(0, 2))
    assert f"{path} has {size - 4} bytes where {MANIFEST} says {size}" in error.message


TORN = {
    "format": 1, "tensor_parallel_size": 2, "expert_parallel": False, "architecture": "a",
    "source": "s", "weight_version": "v", "num_bytes": [8],
}  # fmt: skip
"""The size of the second file is missing."""


@pytest.mark.parametrize(
    ("text", "kind", "told"),
    [
        ('{"format": 2}', Unsupported, "this build reads format 1"),
        ('{"format": 1}', InvalidRequest, "no manifest of shards"),
        (json.dumps(TORN), InvalidRequest, r"no manifest .*1 sizes of files for 2 ranks.*anew"),
        ("[]", InvalidRequest, "must hold a JSON object"),
    ],
)
def test_a_manifest_that_cannot_be_read(
    made: Path, text: str, kind: type[ServiceError], told: str
) -> None:
    (made / MANIFEST).write_text(text)
    with pytest.raises(kind, match=told):
        load(made, Group(1, 2))


def test_the_weights_keep_their_version(made: Path) -> None:
    """What is cached of one is good for the other; another source is another one."""
    versions = {
        folder: fetch_checkpoint(EngineConfig(model=str(folder)), lambda *_: None).weight_version
        for folder in (made, made.parent / "source")
    }
    assert len(set(versions.values())) == 1
    path = made / MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | {"weight_version": "another"}))
    assert (
        fetch_checkpoint(EngineConfig(model=str(made)), lambda *_: None).weight_version == "another"
    )


def write(source: Path, out: Path, size: int = 2) -> None:
    config = EngineConfig(model=str(source), tensor_parallel_size=size)
    shard_writer.write_shards(config, out, lambda *_: None)


def test_what_is_refused_leaves_nothing(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sorted(tmp_path.iterdir())
    source, out = tmp_path / "source", tmp_path / "out"
    with pytest.raises(FailedPrecondition, match="is there already"):
        write(source, made)
    with pytest.raises(FailedPrecondition, match="is no folder"):
        write(source, tmp_path / "not" / "there")
    with pytest.raises(InvalidRequest, match=r"size 3 does not divide.*pass one of 1, 2, 4"):
        write(source, out, 3)
    with pytest.raises(InvalidRequest, match=f"made for tensor_parallel_size 2 already.*{source}"):
        write(made, out)
    for size in (0, -2):
        with pytest.raises(InvalidRequest, match=f"tensor_parallel_size is {size}; a group has 1"):
            write(source, out, size)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(shard_writer, "_append", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write(source, out)
    assert sorted(tmp_path.iterdir()) == before


@contextmanager
def room_for(num_bytes: int) -> Iterator[None]:
    """In any file that is written here."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_not_taken_for_a_corrupt_checkpoint(made: Path, tmp_path: Path) -> None:
    source, out = made.parent / "source", tmp_path / "out"
    size = (made / file_name(0, 2)).stat().st_size
    for room in (size // 2, size - 1):
        with room_for(room), pytest.raises(FailedPrecondition, match="File too large") as caught:
            write(source, out)
        assert "cannot write " in caught.value.message
        assert "on a disk with room for the whole checkpoint" in caught.value.message
    assert not out.exists()


def test_where_nothing_can_be_written_is_said(made: Path) -> None:
    """It ended in Python's traceback, as did a disk that was full before the weights."""
    source = made.parent / "source"
    with pytest.raises(FailedPrecondition, match="cannot write /proc/out: No such file") as caught:
        write(source, Path("/proc/out"))
    assert caught.value.param == "output"
    small = min(path.stat().st_size for path in source.glob("*.json"))
    with room_for(small - 1), pytest.raises(FailedPrecondition, match="File too large"):
        write(source, made.parent / "out")
    assert not [*made.parent.glob("*out*")]


def test_only_one_share_is_in_memory(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written at once, and what it all adds up to."""
    source, written = made.parent / "source", list[int]()
    real = shard_writer._append

    def watched(file: Any, path: Path, cuts: Any, wrote: Callable[[int], None]) -> None:
        def both(count: int) -> None:
            written.append(count)
            wrote(count)

        real(file, path, cuts, both)

    monkeypatch.setattr(shard_writer, "_append", watched)
    write(source, made.parent / "again")
    sizes = [t.nbytes for rank in (0, 1) for t in load_file(made / file_name(rank, 2)).values()]
    assert sorted(written) == sorted(sizes)

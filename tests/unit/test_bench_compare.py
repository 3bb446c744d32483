"""The table of benchmarks.compare: rows meet by shape, GPUs and set, and only then."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks import compare


def result(path: Path, seconds: dict[str, float], **fields: Any) -> str:
    rows = [
        {
            "set": name,
            "seconds": one,
            "prompt_tokens_per_s": 10.0,
            "output_tokens_per_s": 2000.0,
            "bound_s": 1.5,
            "bound_ratio": 1.5 / one,
        }
        for name, one in seconds.items()
    ]
    head = {"engine": "tidemill 0.1", "gpu": "card", "shape": "qwen3-8b", "gpus": 1, "sets": rows}
    path.write_text(json.dumps(head | fields))
    return str(path)


def test_ratio_is_the_peers_time_over_ours(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = result(tmp_path / "a.json", {"one": 2.0, "two": 3.0})
    peer = result(tmp_path / "b.json", {"one": 5.0, "else": 1.0}, engine="vllm 1")
    assert compare.main([ours, "--peer", peer]) == 0
    head, _, one, two = capsys.readouterr().out.splitlines()
    assert head.endswith("| vllm 1 s | ratio |")
    assert one == "| qwen3-8b | 1 | one | 1.500 | 2.000 | 0.75 | 10 | 2,000 | 5.000 | 2.50x |"
    assert two.endswith("| - | - |")


def test_rows_of_other_sizes_do_not_meet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = result(tmp_path / "a.json", {"one": 2.0})
    peer = result(tmp_path / "b.json", {"one": 5.0}, gpus=2, gpu="another card")
    assert compare.main([ours, "--peer", peer]) == 0
    said = capsys.readouterr()
    assert said.out.splitlines()[-1].endswith("| - | - |")
    assert "different devices: another card, card" in said.err


@pytest.mark.parametrize(
    ("name", "value"), [("dtype", "float8"), ("temperature", 0.0), ("top_k", 1), ("top_p", 0.95)]
)
def test_rows_of_other_settings_do_not_meet(
    name: str, value: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = {"dtype": "bfloat16", "temperature": 0.6}
    one = result(tmp_path / "a.json", {"one": 2.0}, **ours)
    two = result(tmp_path / "b.json", {"one": 1.0}, gpus=2, **ours | {name: value})
    peer = result(tmp_path / "c.json", {"one": 5.0}, **ours | {name: value})
    assert compare.main([one, two, "--peer", peer]) == 0
    said = capsys.readouterr()
    assert "efficiency" not in said.out
    assert said.out.splitlines()[2].endswith("| - | - |")
    assert "different dtypes or sampling" in said.err
    assert "bfloat16 at 0.6" in said.err
    assert compare.main([one, "--peer", result(tmp_path / "d.json", {"one": 5.0}, **ours)]) == 0
    said = capsys.readouterr()
    assert said.out.splitlines()[2].endswith("| 5.000 | 2.50x |"), "the control"
    assert not said.err


def test_without_a_peer_there_is_no_ratio(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare.main([result(tmp_path / "a.json", {"one": 2.0})]) == 0
    assert "ratio" not in capsys.readouterr().out


def test_files_of_other_benchmarks_are_refused(tmp_path: Path) -> None:
    assert compare.main([result(tmp_path / "a.json", {})]) == 1


def test_several_gpus_stand_beside_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = result(tmp_path / "a.json", {"one": 6.0})
    two = result(tmp_path / "b.json", {"one": 4.0, "two": 3.0}, gpus=2)
    assert compare.main([one, two]) == 0
    head, _, *rows = capsys.readouterr().out.splitlines()
    assert head.endswith("| of one GPU | efficiency |")
    ends = [row.split(" | ")[-2:] for row in rows]
    assert ends == [["1.00x", "1.00 |"], ["1.50x", "0.75 |"], ["-", "- |"]]


def test_several_gpus_alone_have_no_efficiency(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [result(tmp_path / "a.json", {"one": 4.0}, gpus=2)]
    files += [result(tmp_path / "b.json", {"one": 6.0}, shape="qwen3-32b")]
    assert compare.main(files) == 0
    assert "efficiency" not in capsys.readouterr().out


def test_every_table_of_a_run_has_a_file_of_its_own(tmp_path: Path) -> None:
    """A shape that comes again, with other sets, and folders whose files have one name."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\nfor word; do :; done; echo "$word"\n')
    python.chmod(0o755)
    shapes = ("qwen3-8b", "qwen3-8b", "models/a/config.json", "models/b/config.json", "mine.json")
    told = subprocess.run(
        ["bash", "benchmarks/run_gpu.sh", tmp_path, *(f"{shape}:mixed256" for shape in shapes)],
        env=os.environ | {"PYTHON": str(python)}, cwd=Path(__file__).parents[2],
        capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    names = [Path(line).relative_to(tmp_path).name for line in told]
    files = ["qwen3-8b.json", "qwen3-8b-2.json", "a.json", "b.json", "mine.json"]
    assert names == [*files, "mine.json"], "the last line is of the table of all"

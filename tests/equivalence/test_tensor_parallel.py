"""Several ranks share a model and answer as one does, token for token in float32."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.equivalence.shapes import SHAPES, VOCAB

TIMEOUT_S = 240.0


def make_cases(folder: Path, names: list[str], **flags: Any) -> list[dict[str, Any]]:
    """One for each shape: greedy, drawn, filtered and scored requests beside each other, of several
    lengths. `flags` are more fields of the config."""
    cases = []
    for name in names:
        shape, rng = SHAPES[name], random.Random(name)
        model = folder / name
        model.mkdir()
        (model / "config.json").write_text(json.dumps(shape.config))
        kinds = shape.sampling * (2 if len(shape.sampling) > 1 else 4)
        prompts = [[rng.randrange(VOCAB - 8) for _ in range(rng.randint(2, 30))] for _ in kinds]
        config = {
            "model": str(model),
            "load_format": "dummy",
            "device": "cpu",
            "max_rows": 3,
            "max_model_len": 64,
            "page_size": 8,
            "seed": 3,
            **flags,
        }
        cases.append(
            {
                "config": config,
                "prompts": prompts,
                "count": 10,
                "knobs": [shape.knobs] * len(prompts),
                "sampling": kinds,
            }
        )
    return cases


def answers(*groups: tuple[Path, int, int]) -> list[list[Any]]:
    """Of all cases in the folder, by so many ranks in so many stages, which all find the same: for
    each of the groups."""
    told = json.dumps([[str(folder), *sizes] for folder, *sizes in groups])
    command = [sys.executable, "-m", "tests.equivalence.rank_main", told]
    limit = TIMEOUT_S * len(groups)
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
    assert done.returncode == 0, done.stderr
    return [found(*group) for group in groups]


def found(folder: Path, size: int, num_stages: int) -> list[Any]:
    files = [folder / f"found-{size}-{num_stages}-{rank}.json" for rank in range(size)]
    assert len({path.read_text() for path in files}) == 1, "ranks disagree"
    return list(json.loads(files[0].read_text()))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("size", [2, 4])
def test_every_architecture_answers_as_one_rank(tmp_path: Path, size: int) -> None:
    names = [name for name, shape in SHAPES.items() if size in shape.sizes]
    cases = make_cases(tmp_path, names)
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    alone, together = answers((tmp_path, 1, 1), (tmp_path, size, 1))
    wrong = [name for name, one, other in zip(names, alone, together, strict=True) if one != other]
    assert not wrong
    assert all(len({tuple(tokens) for tokens in one}) > 1 for one in alone), "nothing is decided"

"""benchmarks.in_turn: what it calls "without" is without the shortcut, the other one is with it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from benchmarks import in_turn
from engine_service.sampling import sampler
from engine_service.sampling.head import UnfinishedLogits
from tests.equivalence.shapes import SHAPES
from tidemill.llm import LLM

TAKEN = {
    "open_positions": (sampler, "_choose_open", lambda *_: True),
    "last_layer": (UnfinishedLogits, "_finish", lambda *_: True),
}
"""What is called, and whether the shortcut is taken in a call."""


@pytest.mark.parametrize("shortcut", in_turn.WITHOUT)
def test_one_of_two_goes_without(
    shortcut: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name, is_taken = TAKEN[shortcut]
    counts = [0]  # at the start of the engine

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*inputs: Any) -> Any:
            counts[-1] += is_taken(*inputs)
            return real(*inputs)

        return call

    def generate(llm: LLM, *asked: Any, real: Any = LLM.generate, **options: Any) -> Any:
        counts.append(0)
        return real(llm, *asked, **options)

    monkeypatch.setattr(LLM, "generate", generate)
    path, out = tmp_path / "config.json", tmp_path / "figures.json"
    path.write_text(json.dumps(SHAPES["sdar"].config))
    sizes = ("--requests=3", "--input=40", "--output=16", "--rounds=2")
    with patch.object(owner, name, counted(getattr(owner, name))):
        assert in_turn.main([shortcut, f"--shape={path}", *sizes, f"--json={out}"]) == 0
    assert [count > 0 for count in counts[1:]] == [False, True, False, True, False]
    figures = json.loads(out.read_text())
    assert {kind: len(runs) for kind, runs in figures["seconds"].items()} == {
        "with": 2,
        "without": 2,
    }
    assert figures["asked"]["shortcut"] == shortcut

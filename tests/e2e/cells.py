"""The cells of a canvas in a browser: how they are read, and how they have to fall."""

from __future__ import annotations

WATCH = """() => {
  const root = document.getElementById('canvas');
  const seen = window.seen = [];
  const look = () => seen.push([...root.children].map((c) => c.classList[1]));
  new MutationObserver(look).observe(root, {subtree: true, childList: true, attributes: true});
}"""
"""Keeps the state of every cell at every change."""

CELLS = "() => [...document.querySelectorAll('#canvas .cell')].map((c) => c.textContent)"

FEW_STAGES = 4


def num_stages(seen: list[list[str]]) -> int:
    """How many different numbers of masked cells there were."""
    return len({states.count("masked") for states in seen})


def check_reveal(seen: list[list[str]], num_tokens: int) -> None:
    """Every answered position was masked at first, then fixed, and stayed so."""
    was_masked, was_fixed = set(), set()
    for states in seen:
        masked = {i for i, state in enumerate(states) if state == "masked"}
        assert not masked & was_fixed
        was_masked |= masked
        was_fixed |= {i for i, state in enumerate(states) if state == "fixed"}
    assert was_fixed >= set(range(num_tokens))
    assert len(was_masked & was_fixed) >= num_tokens // 2
    assert num_stages(seen) > FEW_STAGES, "cells fell all at once"

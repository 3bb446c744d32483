"""Every rule and every cache of a diffusion model, measured as the command does."""

from __future__ import annotations

import pytest

from engine_service.decoding.canvas_cache import CACHES
from engine_service.decoding.rules import RULES
from tidemill.bench import quality
from tidemill.bench.quality import QualityOptions, run, table
from tidemill.runtime.errors import InvalidRequest

SLOW = [f"cache {name}, one a step" for name in CACHES]


def test_every_rule_and_cache_of_a_full_canvas_is_measured() -> None:
    """A cache shows what it costs where blocks take many steps; there no rule is faster than one
    position a step, and what is computed whole is as exact as without any."""
    asked = QualityOptions(model="demo-canvas", items=3, max_tokens=16, every_rule=True)
    result = run(asked)
    rules = result["rules"]
    assert set(rules) == {*RULES, *(f"cache {name}" for name in CACHES), *SLOW}
    for name in SLOW:
        assert rules[name]["tokens_per_forward"] <= 1.0
    assert rules["cache none, one a step"] == rules["low_confidence"]
    assert rules["cache none"] == result["tasks"]["all"]
    assert rules["cache none"]["tokens_per_forward"] > 2
    printed = dict(table(result))
    for name in rules:
        assert "tokens/forward" in printed[name]
        assert " ± " in printed[name]
        assert "3 items" in printed[name]


def test_a_model_without_rules_is_told_before_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quality, "_ask", None)
    with pytest.raises(InvalidRequest, match="autoregressive") as refused:
        run(QualityOptions(model="demo", items=1, max_tokens=2, every_rule=True))
    assert refused.value.param == "every_rule"

"""Quality of the built-in models: exact match per task over held-out items, tokens per forward.

Items are asked as chat turns, greedy. A token counts until and including end-of-sequence; a
forward is every model step that the request took part in, prefill and storing passes included.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from engine_service.model_folder import check_model
from tidemill.bench.bounds import OneOrMore
from tidemill.bench.early import kept_if_ended
from tidemill.bench.tasks import Item, held_out, is_correct
from tidemill.runtime.errors import InvalidRequest

if TYPE_CHECKING:
    from tidemill.llm import LLM


_ONE_A_STEP = {"remasking": "low_confidence"}


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityOptions:
    """Flags of `tidemill bench quality`."""

    model: str = "demo"
    """Built-in model, local folder, or hub id."""
    items: OneOrMore = 2000
    """Held-out items, spread evenly over the tasks."""
    max_tokens: OneOrMore = 96
    """Longest answer."""
    params: dict[str, Any] = field(default_factory=dict)
    """Knobs of the decoding method, as JSON, for example {"threshold": 0.9}."""
    every_rule: bool = False
    """Measures every unmask rule of a diffusion model too, and every cache, by the default rule and
    at one position a step."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Number format."""
    json: str | None = None
    """File for the results."""


@dataclass(slots=True)
class _Tally:
    items: int = 0
    correct: int = 0
    tokens: int = 0
    forwards: int = 0

    def figures(self) -> dict[str, float]:
        share = self.correct / self.items
        return {
            "items": self.items,
            "exact_match": share,
            "standard_error": math.sqrt(share * (1 - share) / self.items),
            "tokens_per_forward": self.tokens / self.forwards,
            "forwards": self.forwards,
        }


def run(options: QualityOptions) -> dict[str, Any]:
    """Asks every held-out item once per variant; figures per task and over all.

    `tasks` and `first_misses` are those of `params` as given; with `every_rule`, `rules` has the
    figures of all.
    """
    check_model(options.model)
    from tidemill.llm import LLM

    llm = LLM(options.model, dtype=options.dtype)
    named = _variants(llm.facts.default_method, options.params) if options.every_rule else {}
    tasks, misses = _ask(llm, options, options.params)
    result: dict[str, Any] = {
        "benchmark": "quality",
        "model": options.model,
        "params": options.params,
        "tasks": tasks,
        "first_misses": misses,
    }
    if options.every_rule:
        rules = result["rules"] = {}
        with kept_if_ended(result, tasks):
            for name, params in named.items():
                rules[name] = _ask(llm, options, params)[0]["all"]
    return result


def _ask(
    llm: LLM, options: QualityOptions, params: dict[str, Any]
) -> tuple[dict[str, dict[str, float]], list[dict[str, str]]]:
    """Figures per task, and the first misses."""
    from tidemill.sampling_params import SamplingParams

    items = held_out(options.items)
    asked = SamplingParams(temperature=0.0, max_tokens=options.max_tokens, method_params=params)
    chats = [[{"role": "user", "content": item.prompt}] for item in items]
    tallies: dict[str, _Tally] = defaultdict(_Tally)
    misses: list[dict[str, str]] = []
    for item, output in zip(items, llm.chat(chats, asked), strict=True):
        text = output.outputs[0].text
        for name in (item.task, "all"):
            tally = tallies[name]
            tally.items += 1
            tally.correct += is_correct(item, text)
            tally.tokens += output.usage.output_tokens
            tally.forwards += output.usage.forward_passes
        _remember_miss(misses, item, text)
    return {name: tally.figures() for name, tally in tallies.items()}, misses


def _variants(method: str, params: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Every rule of a diffusion method with its default knobs, and every cache with the default
    rule and with one that reveals one position a step, as the default one hardly ever uses what was
    kept; `params` that are no rule's stay. Raises InvalidRequest where there is one way only."""
    from engine_service.decoding.canvas_cache import CACHES, without_other_caches
    from engine_service.decoding.full_canvas import FullCanvas
    from engine_service.decoding.rules import RULES

    if method == "autoregressive":
        raise InvalidRequest(
            "every_rule measures the unmask rules of a diffusion model, and this model is "
            "autoregressive; leave it out",
            param="every_rule",
        )
    read = {knob for rule in RULES.values() for knob in rule.reads} | {"remasking"}
    kept = {name: value for name, value in params.items() if name not in read}
    named = {name: {**kept, "remasking": name} for name in RULES}
    if method == FullCanvas.name:
        for cache in CACHES:
            own = {"cache": cache}
            named[f"cache {cache}"] = without_other_caches(params, own) | own
            slow = without_other_caches(kept, own) | own | _ONE_A_STEP
            named[f"cache {cache}, one a step"] = slow
    return named


def _remember_miss(misses: list[dict[str, str]], item: Item, text: str) -> None:
    if len(misses) < 10 and not is_correct(item, text):
        misses.append({"prompt": item.prompt, "answer": item.answer, "text": text})


def table(result: dict[str, Any]) -> list[tuple[str, str]]:
    """Lines for the terminal."""
    rows = {**result["tasks"], **result.get("rules", {})}
    return [
        (
            name,
            f"{row['exact_match']:.3f} ± {row['standard_error']:.3f}  "
            f"{row['tokens_per_forward']:.2f} tokens/forward  "
            f"{row['forwards']:.0f} forwards  {row['items']} items",
        )
        for name, row in rows.items()
    ]

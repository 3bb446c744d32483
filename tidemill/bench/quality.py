"""Quality of the built-in models: exact match per task over held-out items, tokens per forward.

Items are asked as chat turns, greedy. A token counts until and including end-of-sequence; a
forward is every model step that the request took part in, prefill and storing passes included.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, Literal

from tidemill.bench.tasks import Item, held_out, is_correct


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityOptions:
    """Flags of `tidemill bench quality`."""

    model: str = "demo"
    """Built-in model, local folder, or hub id."""
    items: int = 2000
    """Held-out items, spread evenly over the tasks."""
    max_tokens: int = 96
    """Longest answer."""
    params: dict[str, Any] = field(default_factory=dict)
    """Knobs of the decoding method, as JSON, for example {"threshold": 0.9}."""
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
        }


def run(options: QualityOptions) -> dict[str, Any]:
    """Asks every held-out item once and returns figures per task and over all."""
    from tidemill.llm import LLM
    from tidemill.sampling_params import SamplingParams

    llm = LLM(options.model, dtype=options.dtype)
    items = held_out(options.items)
    params = SamplingParams(
        temperature=0.0, max_tokens=options.max_tokens, method_params=options.params
    )
    chats = [[{"role": "user", "content": item.prompt}] for item in items]
    outputs = llm.chat(chats, params)
    tallies: dict[str, _Tally] = defaultdict(_Tally)
    misses: list[dict[str, str]] = []
    for item, output in zip(items, outputs, strict=True):
        text = output.outputs[0].text
        for name in (item.task, "all"):
            tally = tallies[name]
            tally.items += 1
            tally.correct += is_correct(item, text)
            tally.tokens += output.usage.output_tokens
            tally.forwards += output.usage.forward_passes
        _remember_miss(misses, item, text)
    return {
        "benchmark": "quality",
        "model": options.model,
        "params": options.params,
        "tasks": {name: tally.figures() for name, tally in tallies.items()},
        "first_misses": misses,
    }


def _remember_miss(misses: list[dict[str, str]], item: Item, text: str) -> None:
    if len(misses) < 10 and not is_correct(item, text):
        misses.append({"prompt": item.prompt, "answer": item.answer, "text": text})


def table(result: dict[str, Any]) -> list[tuple[str, str]]:
    """Lines for the terminal."""
    return [
        (
            name,
            f"{row['exact_match']:.3f} ± {row['standard_error']:.3f}  "
            f"{row['tokens_per_forward']:.2f} tokens/forward  {row['items']} items",
        )
        for name, row in result["tasks"].items()
    ]

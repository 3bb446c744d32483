"""Which of several sequences are returned: best_of. It does not know how they were generated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from frontend.choice import Choice
from frontend.request import Options
from frontend.result import ChoiceResult


def likeliest(
    results: list[ChoiceResult], choices: Sequence[Choice], options: Options
) -> list[ChoiceResult]:
    """Of each prompt's `width` finished sequences the `n` likeliest, best first and numbered anew.

    `choices` are those of the results. Likelihood is the mean log-probability of a sequence's
    tokens, the one that ended it included: as the model gives them, before penalties and
    temperature. What was aborted or failed comes last; of equals, the first.
    """
    if not options.ranks:
        return results
    width, found = options.width, []
    for start in range(0, len(results), width):
        order = sorted(range(start, start + width), key=lambda i: _cost(results[i], choices[i]))
        found += order[: options.n]
    return [replace(results[i], index=index) for index, i in enumerate(found)]


def _cost(result: ChoiceResult, choice: Choice) -> tuple[bool, float]:
    is_broken = result.finish_reason in ("abort", "error")
    return is_broken, -sum(choice.scored) / max(1, len(choice.scored))

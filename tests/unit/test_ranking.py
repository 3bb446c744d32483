"""best_of: which of several sequences are returned, against picking the best one by one."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from frontend.choice import Choice, PromptView
from frontend.messages import Delta, TokenLogprobs
from frontend.ranking import likeliest
from frontend.request import Options
from frontend.result import ChoiceResult
from frontend.tokenizer import TextTokenizer
from tests.service.frontends import write_tokenizer


def picked(scored: list[list[float]], n: int) -> list[int]:
    """Places of the n sequences with the highest mean, the first of equals first."""
    left, found = list(range(len(scored))), []
    for _ in range(n):
        best = left[0]
        for one in left[1:]:
            if sum(scored[one]) / len(scored[one]) > sum(scored[best]) / len(scored[best]):
                best = one
        left.remove(best)
        found.append(best)
    return found


def ranked(scored: list[list[float]], options: Options, reasons: list[str] | None = None) -> Any:
    results = [
        ChoiceResult(i, token_ids=[i], finish_reason=reasons[i] if reasons else "stop")
        for i in range(len(scored))
    ]
    choices: Any = [SimpleNamespace(scored=one) for one in scored]
    return likeliest(results, choices, options)


def test_the_likeliest_come_first(seed: int) -> None:
    rng, differs_from_sum = random.Random(seed), False
    for _ in range(50):
        prompts, width = rng.randint(1, 3), rng.randint(2, 6)
        n = rng.randint(1, width - 1)
        scored = [
            [rng.choice((-0.5, -1.0, -3.0)) for _ in range(rng.randint(1, 5))]
            for _ in range(prompts * width)
        ]
        found = ranked(scored, Options(n=n, best_of=width))
        expected, by_sum = [], []
        for start in range(0, len(scored), width):
            group = scored[start : start + width]
            expected += [start + i for i in picked(group, n)]
            by_sum += [start + i for i in picked([[sum(one)] for one in group], n)]
        assert [one.token_ids for one in found] == [[i] for i in expected]
        assert [one.index for one in found] == list(range(prompts * n))
        differs_from_sum |= expected != by_sum
    assert differs_from_sum, "a rule that ignores the length would have passed"


def test_what_was_broken_off_comes_last() -> None:
    found = ranked([[-0.1], [-5.0], [-9.0]], Options(n=2, best_of=3), ["abort", "stop", "length"])
    assert [one.token_ids for one in found] == [[1], [2]]


@pytest.mark.parametrize("options", [Options(n=3), Options(n=3, best_of=3)])
def test_nothing_is_ranked_where_all_are_returned(options: Options) -> None:
    found = ranked([[-5.0], [-1.0], [-0.1]], options)
    assert [one.token_ids for one in found] == [[0], [1], [2]]


def test_a_choice_scores_the_tokens_that_it_keeps(tmp_path: Any) -> None:
    """Up to the end of a stop string; a pinned token has no score. The client sees no scores."""
    write_tokenizer(tmp_path)
    options = Options(best_of=2, stop=("bc",))
    choice = Choice(0, PromptView([97], "a"), TextTokenizer(tmp_path), options)
    scores = [TokenLogprobs((i,), (-i / 100,), 1) for i in range(97, 101)]
    scores[0] = TokenLogprobs((), (), 0)
    shown = choice.feed(Delta(0, token_ids=[97, 98, 99, 100], logprobs=scores))
    assert shown is not None
    assert (shown.text, shown.token_ids, shown.logprobs) == ("a", [97, 98, 99], [])
    assert choice.scored == [-0.98, -0.99]

"""Requests of all kinds through an LLM of several ranks, with aborts and preemptions.

`python -m tests.equivalence.mixed_requests MODEL NUM_RANKS [NUM_STAGES [FLAGS]]` prints what they
got, as JSON; FLAGS are more fields of the config, as JSON.
"""

from __future__ import annotations

import json
import random
import sys
from typing import Any
from unittest.mock import patch

from engine_service.core.messages import Abort
from engine_service.ranks import silence
from tidemill import LLM, SamplingParams
from tidemill.outputs import RequestOutput

WORDS = ("The", "king", "and", "his", "men", "shall", "go", "to", "war", ",", "lord", "Speak")


def ask(llm: LLM, rng: random.Random, number: int) -> str:
    params = SamplingParams(
        max_tokens=rng.randint(8, 60),
        temperature=rng.choice((0.0, 0.7, 1.3)),
        top_p=rng.choice((1.0, 0.9)) if llm.config.model == "demo" else 1.0,
        seed=number,
        n=rng.choice((1, 1, 2)),
        logprobs=rng.choice((None, 2)),
    )
    return llm.add_request(" ".join(rng.choices(WORDS, k=rng.randint(1, 30))), params)


def show(output: RequestOutput) -> list[Any]:
    return [[one.index, one.token_ids, one.finish_reason] for one in output.outputs]


SIZES: dict[str, Any] = {
    "device": "cpu", "max_rows": 4, "num_pages": 14, "page_size": 16, "max_model_len": 224,
    "seed": 3, "token_budget": 96, "log_level": "warning",
}  # fmt: skip


class Live:
    """Counts the steps that are in flight."""

    def __init__(self, executor: Any) -> None:
        self.now = self.most = 0
        launch, collect = executor.launch, executor.collect

        def launched(plan: Any) -> Any:
            self.now += 1
            self.most = max(self.most, self.now)
            return launch(plan)

        def collected(handle: Any) -> Any:
            self.now -= 1
            return collect(handle)

        executor.launch, executor.collect = launched, collected


# A busy machine may starve a rank for seconds, which says nothing about its tokens.
@patch.object(silence, "SERVING_S", 60.0)
def found(model: str, num_ranks: int, num_stages: int = 1, **flags: Any) -> dict[str, Any]:
    """What they answer, and how they got there."""
    rng = random.Random(5)
    grid = {
        "tensor_parallel_size": num_ranks // num_stages,
        "pipeline_parallel_size": num_stages,
    }
    llm = LLM(model, **{**SIZES, **grid, **flags})
    live = Live(llm.engine.executor)
    asked = [ask(llm, rng, number) for number in range(14)]
    shown: dict[str, Any] = {}
    preemptions = steps = 0
    while llm.has_unfinished_requests:
        for output in llm.step():
            shown[output.request_id] = show(output)
            preemptions += output.usage.preemptions
        steps += 1
        if steps % (9 * num_stages) == 0:  # somebody goes away
            keys = sorted(llm._live)
            if len(keys) > 2:
                llm._scheduler.abort(Abort(keys[1]))
    llm.close()
    answers = [shown[request_id] for request_id in asked]
    return {"answers": answers, "steps": steps, "preemptions": preemptions, "live": live.most}


def main(model: str, num_ranks: int, num_stages: int = 1, **flags: Any) -> None:
    print(json.dumps(found(model, num_ranks, num_stages, **flags)))


if __name__ == "__main__":
    sizes = [int(word) for word in sys.argv[2:4]]
    main(sys.argv[1], *sizes, **json.loads("".join(sys.argv[4:]) or "{}"))
